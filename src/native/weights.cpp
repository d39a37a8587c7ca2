#include "weights.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace specinfer {

Weights::Weights(const Shape& s, const std::vector<Type>& types, const Kernels& k) : shape(s), kernels(k) {
  const int panel = k.panel, dim = s.head_dim;
  const int qkv = (s.heads + 2 * s.kv_heads) * dim, out = s.heads * dim;
  if (types.size() != 4 * size_t(s.layers) + 1 + !s.tied) throw std::invalid_argument("types and layers disagree");
  auto panels = [&](int n) { return (n + panel - 1) / panel; };
  auto make = [&, next = types.begin()](int outputs, int inputs, int count) mutable {
    Linear linear;
    linear.type = *next == Type::bf16 ? k.bf16 : *next;
    ++next;
    linear.inputs = inputs;
    linear.outputs = outputs;
    linear.panels = count;
    if (linear.type == Type::f16) throw std::invalid_argument("float16 is read, but not stored");
    if (is_quantized(linear.type) && inputs % unit_inputs(linear.type))
      throw std::invalid_argument(std::to_string(inputs) + " inputs do not go into blocks");
    return linear;
  };
  const int64_t norm = round_up(4 * s.padded_hidden(panel), 64);
  layers.resize(s.layers);
  for (Layer& layer : layers) {
    layer.qkv = make(qkv, s.hidden, panels(qkv));
    layer.out = make(s.hidden, out, panels(s.hidden));
    layer.gate_up = make(2 * s.intermediate, s.hidden, 2 * panels(s.intermediate));
    layer.down = make(s.hidden, s.intermediate, panels(s.hidden));
  }
  head = make(s.vocab, s.hidden, panels(s.vocab));
  if (!s.tied) embedding = make(s.vocab, s.hidden, panels(s.vocab));
  std::vector<Linear*> linears;
  for (Layer& layer : layers) linears.insert(linears.end(), {&layer.qkv, &layer.out, &layer.gate_up, &layer.down});
  linears.push_back(&head);
  if (!s.tied) linears.push_back(&embedding);
  size_ = norm * (2 * s.layers + 1);
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
  for (Layer& layer : layers) {
    layer.input_norm = static_cast<float*>(take(norm));
    layer.post_norm = static_cast<float*>(take(norm));
  }
  final_norm = static_cast<float*>(take(norm));
  for (Linear* l : linears) l->data = static_cast<char*>(take(l->panels * panel_bytes(l->type, l->inputs, panel)));
  missing_ = 9LL * s.layers + 2 + !s.tied;
}

Weights::~Weights() { munmap(map_, mapped_); }

void* Weights::take(int64_t bytes) {
  void* result = block_ + used_;
  used_ += round_up(bytes, 64);
  if (used_ > size_) throw std::logic_error("weights do not fit their block");
  return result;
}

Weights::Place Weights::place(const std::string& name, int index) {
  const int dim = shape.head_dim, q = shape.heads * dim, kv = shape.kv_heads * dim;
  if (name == "head") return {&head, 0, shape.vocab, shape.hidden, 1, 0};
  if (name == "embedding" && !shape.tied) return {&embedding, 0, shape.vocab, shape.hidden, 1, 0};
  if (index < 0 || index >= shape.layers) throw std::invalid_argument("there is no layer " + std::to_string(index));
  Layer& layer = layers[index];
  if (name == "q") return {&layer.qkv, 0, q, shape.hidden, 1, 0};
  if (name == "k") return {&layer.qkv, q, kv, shape.hidden, 1, 0};
  if (name == "v") return {&layer.qkv, q + kv, kv, shape.hidden, 1, 0};
  if (name == "out") return {&layer.out, 0, shape.hidden, q, 1, 0};
  if (name == "gate") return {&layer.gate_up, 0, shape.intermediate, shape.hidden, 2, 0};
  if (name == "up") return {&layer.gate_up, 0, shape.intermediate, shape.hidden, 2, 1};
  if (name == "down") return {&layer.down, 0, shape.hidden, shape.intermediate, 1, 0};
  throw std::invalid_argument("there is no weight '" + name + "'");
}

static void check_shape(const std::string& name, int64_t rows, int64_t columns, int64_t want, int64_t want_columns) {
  if (rows != want || columns != want_columns)
    throw std::invalid_argument(name + " is " + std::to_string(rows) + " x " + std::to_string(columns) + ", not " +
                                std::to_string(want) + " x " + std::to_string(want_columns));
}

void Weights::set(const std::string& name, int index, const void* data, Type type, int64_t rows, int64_t columns) {
  --missing_;
  const Place p = place(name, index);
  check_shape(name, rows, columns, p.outputs, p.inputs);
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

void Weights::set_norm(const std::string& name, int index, const float* data, int64_t size) {
  --missing_;
  check_shape(name, size, 1, shape.hidden, 1);
  float* out = final_norm;
  if (name != "final_norm") {
    if (index < 0 || index >= shape.layers) throw std::invalid_argument("there is no layer " + std::to_string(index));
    if (name != "input_norm" && name != "post_norm") throw std::invalid_argument("there is no norm '" + name + "'");
    out = name == "input_norm" ? layers[index].input_norm : layers[index].post_norm;
  }
  std::memcpy(out, data, 4 * size);
}

void Weights::check_complete() const {
  if (missing_ != 0) throw std::invalid_argument(std::to_string(missing_) + " weights are not set");
}

void Weights::embed(int64_t token, float* out) const {
  const int n = shape.hidden, panel = kernels.panel;
  std::memset(out + n, 0, 4 * (shape.padded_hidden(panel) - n));
  unpack(shape.tied ? head : embedding, panel, token / panel, token % panel, out);
}

}  // namespace specinfer
