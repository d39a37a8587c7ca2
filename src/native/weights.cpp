#include "weights.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace specinfer {

Weights::Weights(const Shape& s, const std::vector<Type>& types, const Kernels& k) : shape(s), kernels(k) {
  const int panel = k.panel, dim = s.head_dim;
  const int kv = s.kv_heads * dim, out = s.heads * dim;
  if (types.size() != 5 * size_t(s.layers) + 1 + !s.tied + s.features) throw std::invalid_argument("types and layers disagree");
  auto panels = [&](int n) { return (n + panel - 1) / panel; };
  auto make = [&](Type type, int outputs, int inputs, int count) {
    Linear linear;
    linear.type = k.kept(type);
    linear.inputs = inputs;
    linear.outputs = outputs;
    linear.panels = count;
    if (linear.type == Type::f16) throw std::invalid_argument("float16 is read, but not stored");
    if (is_quantized(linear.type) && inputs % unit_inputs(linear.type))
      throw std::invalid_argument(std::to_string(inputs) + " inputs do not go into blocks");
    return linear;
  };
  const bool gated = s.inner == Store::gated;
  std::vector<std::pair<Norm*, int64_t>> norms{{&final_norm, s.padded_hidden(panel)}};
  layers.resize(s.layers);
  withheld_.resize(s.layers);
  const Type* type = types.data();
  for (Layer& layer : layers) {
    const bool apart = type[1] != type[0];
    const int fused = out + (apart ? kv : 2 * kv);
    layer.qkv = make(type[0], fused, s.hidden, panels(fused));
    if (apart) layer.v = make(type[1], kv, s.hidden, panels(kv));
    layer.out = make(type[2], s.hidden, out, panels(s.hidden));
    layer.inner = make(type[3], (1 + gated) * s.intermediate, s.hidden, (1 + gated) * panels(s.intermediate));
    layer.down = make(type[4], s.hidden, s.intermediate, panels(s.hidden));
    type += 5;
    for (Norm* n : {&layer.input_norm, &layer.post_norm}) norms.push_back({n, s.padded_hidden(panel)});
    if (s.head_norms)
      for (Norm* n : {&layer.q_norm, &layer.k_norm}) norms.push_back({n, dim});
  }
  head = make(type[0], s.head_size, s.hidden, panels(s.head_size));
  if (!s.tied) embedding = make(type[1], s.vocab, s.hidden, panels(s.vocab));
  if (s.features) features = make(types.back(), s.hidden, 2 * s.hidden, panels(s.hidden));
  std::vector<Linear*> linears;
  for (Layer& layer : layers)
    linears.insert(linears.end(), {&layer.qkv, &layer.v, &layer.out, &layer.inner, &layer.down});
  linears.push_back(&head);
  if (!s.tied) linears.push_back(&embedding);
  if (s.features) linears.push_back(&features);
  for (const auto& [n, length] : norms) size_ += (1 + s.layer_norm) * round_up(4 * length, 64);
  for (const Linear* l : linears)
    size_ += round_up(l->panels * panel_bytes(l->type, l->inputs, panel), 64) + round_up(4 * l->panels * panel, 64);
  mapped_ = round_up(size_, 1 << 21) + (1 << 21);
  void* map = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  map_ = static_cast<char*>(map);
  block_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(map_), 1 << 21));
#ifdef MADV_HUGEPAGE
  madvise(block_, size_, MADV_HUGEPAGE);
#endif
  for (const auto& [n, length] : norms) {
    n->weight = static_cast<float*>(take(4 * length));
    if (s.layer_norm) n->bias = static_cast<float*>(take(4 * length));
  }
  for (Linear* l : linears) l->data = static_cast<char*>(take(l->panels * panel_bytes(l->type, l->inputs, panel)));
  for (const Linear* l : linears) missing_ += l->outputs;
  missing_ += int64_t(norms.size());
}

Weights::~Weights() { munmap(map_, mapped_); }

void* Weights::take(int64_t bytes) {
  void* result = block_ + used_;
  used_ += round_up(bytes, 64);
  if (used_ > size_) throw std::logic_error("weights do not fit their block");
  return result;
}

Layer& Weights::layer_at(int index) {
  if (index < 0 || index >= shape.layers) throw std::invalid_argument("there is no layer " + std::to_string(index));
  return layers[index];
}

Weights::Place Weights::place(const std::string& name, int index) {
  const int dim = shape.head_dim, q = shape.heads * dim, kv = shape.kv_heads * dim;
  if (name == "head") return {&head, 0, shape.head_size, shape.hidden, 1, 0};
  if (name == "embedding" && !shape.tied) return {&embedding, 0, shape.vocab, shape.hidden, 1, 0};
  if (name == "features" && shape.features) return {&features, 0, shape.hidden, 2 * shape.hidden, 1, 0};
  Layer& layer = layer_at(index);
  const int gated = shape.inner == Store::gated;
  const bool apart = layer.v.panels > 0;
  if (name == "qkv" && !apart) return {&layer.qkv, 0, q + 2 * kv, shape.hidden, 1, 0};
  if (name == "q") return {&layer.qkv, 0, q, shape.hidden, 1, 0};
  if (name == "k") return {&layer.qkv, q, kv, shape.hidden, 1, 0};
  if (name == "v") return {apart ? &layer.v : &layer.qkv, apart ? 0 : q + kv, kv, shape.hidden, 1, 0};
  if (name == "out") return {&layer.out, 0, shape.hidden, q, 1, 0};
  if (name == "gate" && gated) return {&layer.inner, 0, shape.intermediate, shape.hidden, 2, 0};
  if (name == "up") return {&layer.inner, 0, shape.intermediate, shape.hidden, 1 + gated, gated};
  if (name == "down") return {&layer.down, 0, shape.hidden, shape.intermediate, 1, 0};
  throw std::invalid_argument("there is no weight '" + name + "'");
}

static void check_shape(const std::string& name, int64_t rows, int64_t columns, int64_t want, int64_t want_columns) {
  if (rows != want || columns != want_columns)
    throw std::invalid_argument(name + " is " + std::to_string(rows) + " x " + std::to_string(columns) + ", not " +
                                std::to_string(want) + " x " + std::to_string(want_columns));
}

void Weights::set(const std::string& name, int index, const void* data, Type type, int64_t rows, int64_t columns) {
  const Place p = place(name, index);
  check_shape(name, rows, columns, p.outputs, p.inputs);
  missing_ -= rows;
  const int panel = kernels.panel;
  const int64_t row_bytes = is_quantized(type) ? stored_bytes(type, columns) : columns * (type == Type::f32 ? 4 : 2);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = p.column + row;
    pack(*p.linear, panel, at / panel * p.stride + p.parity, at % panel,
         static_cast<const char*>(data) + row * row_bytes, type);
  }
}

void Weights::set_bias(const std::string& name, int index, const float* data, int64_t rows) {
  const Place p = place(name, index);
  check_shape(name + " bias", rows, 1, p.outputs, 1);
  const int panel = kernels.panel;
  if (!p.linear->bias) p.linear->bias = static_cast<float*>(take(int64_t(p.linear->panels) * panel * 4));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = p.column + row;
    p.linear->bias[(at / panel * p.stride + p.parity) * panel + at % panel] = data[row];
  }
}

void Weights::set_norm(const std::string& name, int index, const float* weight, const float* bias, int64_t size) {
  const bool of_head = name == "q_norm" || name == "k_norm";
  if (of_head ? !shape.head_norms : name != "input_norm" && name != "post_norm" && name != "final_norm")
    throw std::invalid_argument("there is no norm '" + name + "'");
  check_shape(name, size, 1, of_head ? shape.head_dim : shape.hidden, 1);
  if (shape.layer_norm != (bias != nullptr)) throw std::invalid_argument(name + ": LayerNorm has a bias, RMSNorm none");
  Norm* norm = &final_norm;
  if (name == "input_norm") norm = &layer_at(index).input_norm;
  if (name == "post_norm") norm = &layer_at(index).post_norm;
  if (name == "q_norm") norm = &layer_at(index).q_norm;
  if (name == "k_norm") norm = &layer_at(index).k_norm;
  std::memcpy(norm->weight, weight, 4 * size);
  if (bias) std::memcpy(norm->bias, bias, 4 * size);
  --missing_;
}

void Weights::check_complete() const {
  if (missing_ != 0) throw std::invalid_argument(std::to_string(missing_) + " rows and norms are not set");
}

void Weights::withhold(int layer) {
  layer_at(layer);
  std::lock_guard<std::mutex> lock(withheld_mutex_);
  withheld_[layer] = true;
}

void Weights::release(int layer) {
  layer_at(layer);
  {
    std::lock_guard<std::mutex> lock(withheld_mutex_);
    withheld_[layer] = false;
  }
  released_.notify_all();
}

void Weights::wait_for(int layer) const {
  std::unique_lock<std::mutex> lock(withheld_mutex_);
  released_.wait(lock, [&] { return !withheld_[layer]; });
}

void Weights::embed(int64_t token, float* out) const {
  const int n = shape.hidden, panel = kernels.panel;
  std::memset(out + n, 0, 4 * (shape.padded_hidden(panel) - n));
  unpack(shape.tied ? head : embedding, panel, token / panel, token % panel, out);
}

}  // namespace specinfer
