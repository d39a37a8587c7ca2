// The Python side of the extension: raw addresses in, checked numbers through, no tensor library.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "choice.h"
#include "forward.h"

namespace nb = nanobind;
using namespace specinfer;

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static Type type_of(const std::string& name) {
  if (name == "float32") return Type::f32;
  if (name == "bfloat16") return Type::bf16;
  if (name == "float16") return Type::f16;
  if (name == "q8_0") return Type::q8_0;
  if (name == "q4_0") return Type::q4_0;
  if (name == "q4_1") return Type::q4_1;
  if (name == "q4_k") return Type::q4_k;
  if (name == "q6_k") return Type::q6_k;
  throw std::invalid_argument("type '" + name + "' is not known");
}

static Store inner_of(const std::string& name) {
  if (name == "gated") return Store::gated;
  if (name == "relu") return Store::relu;
  if (name == "gelu") return Store::gelu;
  throw std::invalid_argument("inner rows are not made by '" + name + "'");
}

template <typename T>
static T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

class Model {
 public:
  Model(int hidden, int layers, int heads, int kv_heads, int head_dim, int intermediate, int vocab, int head_size,
        float eps, bool tied, const std::string& inner, bool layer_norm, bool head_norms,
        const std::vector<int>& windows, bool features, const std::vector<std::string>& types, const std::string& level,
        int threads)
      : weights_(checked({hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, eps, tied, head_size,
                          inner_of(inner), layer_norm, head_norms, windows, features}),
                 types_of(types), choose_kernels(level.c_str())),
        pool_(shared_pool(threads)),
        forward_(weights_, kv_, positions_, features_) {}

  // Addresses that are 0 are not there, here and below.
  void set(const std::string& name, int layer, uintptr_t data, const std::string& type, int64_t rows, int64_t columns) {
    weights_.set(name, layer, at<void>(data), type_of(type), rows, columns);
  }
  void set_bias(const std::string& name, int layer, uintptr_t data, int64_t rows) {
    weights_.set_bias(name, layer, at<float>(data), rows);
  }
  void set_norm(const std::string& name, int layer, uintptr_t weight, uintptr_t bias, int64_t size) {
    weights_.set_norm(name, layer, at<float>(weight), at<float>(bias), size);
  }

  void set_pool(const std::vector<uintptr_t>& keys, const std::vector<uintptr_t>& values, int64_t slots,
                const std::string& type) {
    if (keys.size() != weights_.layers.size() || values.size() != keys.size())
      throw std::invalid_argument("one K and one V pool a layer are needed");
    if (type != "float32" && type != "bfloat16") throw std::invalid_argument("K/V is float32 or bfloat16");
    kv_ = KvPool{type_of(type), slots, {}, {}};
    for (uintptr_t k : keys) kv_.keys.push_back(at<void>(k));
    for (uintptr_t v : values) kv_.values.push_back(at<void>(v));
  }
  void set_positions(uintptr_t cosine, uintptr_t sine, uintptr_t learned, int64_t count) {
    positions_ = Positions{at<float>(cosine), at<float>(sine), at<float>(learned), count};
  }
  // From now on the target keeps its last hidden rows at `rows`, [slots, hidden], and this draft reads them there; from
  // own_slot on it keeps its own.
  void read_features(Model& target, uintptr_t rows, int64_t own_slot, int64_t null_slot) {
    const Shape &own = weights_.shape, &above = target.weights_.shape;
    if (!own.features || above.hidden != own.hidden || target.weights_.kernels.panel != weights_.kernels.panel)
      throw std::invalid_argument("this model does not read that one's rows");
    if (own_slot < target.kv_.slots - 1 || null_slot < own_slot || null_slot >= kv_.slots)
      throw std::invalid_argument("the slots of the draft and of its target disagree");
    features_ = {&target.weights_, at<float>(rows), own_slot, null_slot, {}};
    target.features_.kept.push_back(features_.rows);
  }
  void withhold(int layer) { weights_.withhold(layer); }
  void release(int layer) { weights_.release(layer); }
  void finish() const { weights_.check_complete(); }

  void forward(Ints context_slots, Ints context_lens, Ints span_lens, Ints slots, Ints parents, Ints token_ids,
               Ints logits_rows, int first_layer, int last_layer, uintptr_t hidden_in, uintptr_t hidden_out,
               uintptr_t logits, Ints captured, Ints capture_out) {
    if (context_lens.size() != span_lens.size() || slots.size() != parents.size() ||
        token_ids.size() != (hidden_in ? 0 : slots.size()) || captured.size() != capture_out.size())
      throw std::invalid_argument("the arrays of a batch disagree in length");
    if (first_layer < last_layer && kv_.keys.empty()) throw std::invalid_argument("there is no K/V pool");
    std::vector<float*> captures;
    for (size_t i = 0; i < captured.size(); ++i) captures.push_back(at<float>(uintptr_t(capture_out.data()[i])));
    Batch b{};
    b.context_slots = context_slots.data();
    b.num_context_slots = int64_t(context_slots.size());
    b.context_lens = context_lens.data();
    b.span_lens = span_lens.data();
    b.num_spans = int64_t(span_lens.size());
    b.slots = slots.data();
    b.parents = parents.data();
    b.token_ids = hidden_in ? nullptr : token_ids.data();
    b.logits_rows = logits_rows.data();
    b.num_rows = int64_t(slots.size());
    b.num_logits = int64_t(logits_rows.size());
    b.hidden_in = at<float>(hidden_in);
    b.hidden_out = at<float>(hidden_out);
    b.logits = at<float>(logits);
    b.first_layer = first_layer;
    b.last_layer = last_layer;
    b.captured = captured.data();
    b.capture_out = captures.data();
    b.num_captured = int64_t(captures.size());
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);  // the scratch rows are this model's own
    forward_.run(b, pool_);
  }

  // Rows before the first layer, [tokens, hidden], of tokens at position 0. By this thread alone: no sooner are others
  // awake than it is done.
  void embed(Ints token_ids, uintptr_t out) const {
    nb::gil_scoped_release release;
    const Shape& s = weights_.shape;
    std::vector<float> row(size_t(s.padded_hidden(weights_.kernels.panel)));
    for (size_t i = 0; i < token_ids.size(); ++i) {
      const int64_t token = token_ids.data()[i];
      if (token < 0 || token >= s.vocab) throw std::invalid_argument("a token id lies outside the vocabulary");
      weights_.embed(token, row.data());
      for (int k = 0; positions_.learned && k < s.hidden; ++k) row[k] += positions_.learned[k];
      std::copy_n(row.data(), s.hidden, at<float>(out) + i * s.hidden);
    }
  }

  int64_t num_bytes() const { return weights_.bytes(); }
  std::string level() const { return weights_.kernels.name; }
  int threads() const { return pool_.threads(); }

 private:
  static std::vector<Type> types_of(const std::vector<std::string>& names) {
    std::vector<Type> types;
    for (const std::string& name : names) types.push_back(type_of(name));
    return types;
  }
  static Shape checked(const Shape& s) {
    if (s.hidden < 1 || s.layers < 0 || s.heads < 1 || s.kv_heads < 1 || s.head_dim < 1 || s.intermediate < 1 ||
        s.vocab < 1 || s.head_size < 1)
      throw std::invalid_argument("a size is not positive");
    if (s.heads % s.kv_heads || s.head_dim % 8)
      throw std::invalid_argument("heads must be a multiple of K/V heads, and head_dim of 8");
    if (s.tied && s.head_size != s.vocab) throw std::invalid_argument("a tied head is as long as its embedding");
    if (s.layer_norm && s.head_norms) throw std::invalid_argument("heads are normalised by RMSNorm alone");
    if (s.windows.size() != size_t(s.layers)) throw std::invalid_argument("one window a layer is needed");
    for (int window : s.windows)
      if (window < 1) throw std::invalid_argument("a window is not positive");
    return s;
  }

  std::mutex mutex_;
  KvPool kv_;
  Positions positions_;
  Features features_;
  Weights weights_;
  Pool& pool_;
  Forward forward_;
};

NB_MODULE(_cpu, m) {
  m.doc() = "Forward passes, noise and choices in native code.";
  // What an interpreter still holds at its exit is its own business, not a user's.
  nb::set_leak_warnings(false);
  m.def("level", [](const std::string& name) { return std::string(choose_kernels(name.c_str()).name); });
  m.def("gumbel", [](uint64_t seed, uint32_t sample_index, uint32_t position, int64_t n, uintptr_t out) {
    gumbel({seed, sample_index, position}, n, at<float>(out));
  });
  m.def("choose", [](uintptr_t logits, int64_t n, float divisor, uint64_t seed, uint32_t sample_index, uint32_t position) {
    return choose(at<float>(logits), n, divisor, {seed, sample_index, position});
  });
  m.def("pick", [](uintptr_t x, int64_t n, int count) {
    std::vector<int64_t> columns(static_cast<size_t>(std::max(count, 0)));
    std::vector<double> shares(columns.size());
    const int found = pick(at<float>(x), n, count, columns.data(), shares.data());
    columns.resize(static_cast<size_t>(found));
    shares.resize(static_cast<size_t>(found));
    return std::make_pair(columns, shares);
  });
  m.def("narrow", [](uintptr_t x, int64_t n, float log_min_p, int64_t top_k, double top_p) {
    return narrow(at<float>(x), n, log_min_p, top_k, top_p);
  });
  m.def("pin", [](int threads, const std::vector<int>& processors) { shared_pool(threads).pin(processors); });
  nb::class_<Model>(m, "Model")
      .def(nb::init<int, int, int, int, int, int, int, int, float, bool, const std::string&, bool, bool,
                    const std::vector<int>&, bool, const std::vector<std::string>&, const std::string&, int>(),
           nb::kw_only(), nb::arg("hidden"), nb::arg("layers"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("head_dim"), nb::arg("intermediate"), nb::arg("vocab"), nb::arg("head_size"), nb::arg("eps"),
           nb::arg("tied"), nb::arg("inner"), nb::arg("layer_norm"), nb::arg("head_norms"), nb::arg("windows"),
           nb::arg("features"), nb::arg("types"), nb::arg("level"), nb::arg("threads"))
      .def("set", &Model::set)
      .def("set_bias", &Model::set_bias)
      .def("set_norm", &Model::set_norm)
      .def("set_pool", &Model::set_pool)
      .def("set_positions", &Model::set_positions)
      .def("read_features", &Model::read_features, nb::keep_alive<1, 2>())
      .def("withhold", &Model::withhold)
      .def("release", &Model::release)
      .def("finish", &Model::finish)
      .def("embed", &Model::embed, nb::arg("token_ids").noconvert(), nb::arg("out"))
      .def("forward", &Model::forward, nb::arg("context_slots").noconvert(), nb::arg("context_lens").noconvert(),
           nb::arg("span_lens").noconvert(), nb::arg("slots").noconvert(), nb::arg("parents").noconvert(),
           nb::arg("token_ids").noconvert(), nb::arg("logits_rows").noconvert(), nb::arg("first_layer"),
           nb::arg("last_layer"), nb::arg("hidden_in"), nb::arg("hidden_out"), nb::arg("logits"),
           nb::arg("captured").noconvert(), nb::arg("capture_out").noconvert())
      .def_prop_ro("num_bytes", &Model::num_bytes)
      .def_prop_ro("level", &Model::level)
      .def_prop_ro("threads", &Model::threads);
}
