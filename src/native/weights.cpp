#include "weights.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace specinfer {

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {
    const float x = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -x : x;
  }
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static float element(const void* data, Type type, int64_t i) {
  if (type == Type::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == Type::bf16 ? from_bits(uint32_t(bits) << 16) : half_to_float(bits);
}

Weights::Weights(const Shape& s, Type t, const Kernels& k) : shape(s), type(t), kernels(k) {
  const int panel = k.panel, dim = s.head_dim;
  const int qkv = (s.heads + 2 * s.kv_heads) * dim, out = s.heads * dim;
  auto panels = [&](int n) { return (n + panel - 1) / panel; };
  const int64_t element_bytes = t == Type::f32 ? 4 : 2;
  auto bytes = [&](int64_t inputs, int64_t count) {
    return round_up(count * panel * inputs * element_bytes, 64) + round_up(count * panel * 4, 64);
  };
  const int64_t norm = round_up(4 * s.padded_hidden(panel), 64);
  const int64_t per_layer = bytes(s.hidden, panels(qkv)) + bytes(out, panels(s.hidden)) +
                            bytes(s.hidden, 2 * panels(s.intermediate)) +
                            bytes(s.intermediate, panels(s.hidden)) + 2 * norm;
  size_ = per_layer * s.layers + norm + bytes(s.hidden, panels(s.vocab));
  if (!s.tied) size_ += round_up(int64_t(s.vocab) * s.hidden * element_bytes, 64);
  mapped_ = round_up(size_, 1 << 21) + (1 << 21);
  void* map = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  block_ = static_cast<char*>(map);
  used_ = round_up(reinterpret_cast<int64_t>(block_), 1 << 21) - reinterpret_cast<int64_t>(block_);
  const int64_t start = used_;
#ifdef MADV_HUGEPAGE
  madvise(block_ + used_, size_, MADV_HUGEPAGE);
#endif
  size_ += used_;
  layers.resize(s.layers);
  for (Layer& layer : layers) {
    layer.input_norm = static_cast<float*>(take(norm));
    layer.post_norm = static_cast<float*>(take(norm));
    layer.qkv = make(qkv, s.hidden, panels(qkv));
    layer.out = make(s.hidden, out, panels(s.hidden));
    layer.gate_up = make(2 * s.intermediate, s.hidden, 2 * panels(s.intermediate));
    layer.down = make(s.hidden, s.intermediate, panels(s.hidden));
  }
  final_norm = static_cast<float*>(take(norm));
  head = make(s.vocab, s.hidden, panels(s.vocab));
  if (!s.tied) table_ = static_cast<char*>(take(int64_t(s.vocab) * s.hidden * element_bytes));
  used_ -= start;
  missing_ = 9LL * s.layers + 2 + !s.tied;
}

Weights::~Weights() { munmap(block_, mapped_); }

void* Weights::take(int64_t bytes) {
  void* result = block_ + used_;
  used_ += round_up(bytes, 64);
  if (used_ > size_) throw std::logic_error("weights do not fit their block");
  return result;
}

Linear Weights::make(int outputs, int inputs, int panels) {
  Linear linear;
  linear.type = type;
  linear.inputs = inputs;
  linear.outputs = outputs;
  linear.panels = panels;
  linear.data = static_cast<char*>(take(int64_t(panels) * kernels.panel * inputs * (type == Type::f32 ? 4 : 2)));
  return linear;
}

Weights::Place Weights::place(const std::string& name, int index) {
  const int dim = shape.head_dim, q = shape.heads * dim, kv = shape.kv_heads * dim;
  if (name == "head") return {&head, 0, shape.vocab, shape.hidden, 1, 0};
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

void Weights::set(const std::string& name, int index, const void* data, Type from, int64_t rows, int64_t columns) {
  --missing_;
  if (name == "embedding") {
    check_shape(name, rows, columns, shape.vocab, shape.hidden);
    for (int64_t i = 0; i < rows * columns; ++i) {
      const float x = element(data, from, i);
      if (type == Type::f32)
        reinterpret_cast<float*>(table_)[i] = x;
      else
        reinterpret_cast<uint16_t*>(table_)[i] = to_bf16(x);
    }
    return;
  }
  const Place p = place(name, index);
  check_shape(name, rows, columns, p.outputs, p.inputs);
  const int panel = kernels.panel, half = panel / 2;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = p.column + row, target = at / panel * p.stride + p.parity, column = at % panel;
    if (type == Type::f32) {
      float* out = reinterpret_cast<float*>(p.linear->data) + target * panel * columns + column;
      for (int64_t k = 0; k < columns; ++k) out[k * panel] = element(data, from, row * columns + k);
    } else {
      const int64_t place_in_panel = column < half ? 2 * column : 2 * (column - half) + 1;
      uint16_t* out = reinterpret_cast<uint16_t*>(p.linear->data) + target * panel * columns + place_in_panel;
      for (int64_t k = 0; k < columns; ++k) out[k * panel] = to_bf16(element(data, from, row * columns + k));
    }
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
  const int n = shape.hidden, panel = kernels.panel, half = panel / 2;
  std::memset(out, 0, 4 * shape.padded_hidden(panel));
  if (!shape.tied) {
    for (int i = 0; i < n; ++i) out[i] = element(table_, type, token * n + i);
    return;
  }
  const int64_t first = token / panel * panel * n, column = token % panel;
  if (type == Type::f32) {
    for (int64_t k = 0; k < n; ++k) out[k] = reinterpret_cast<const float*>(head.data)[first + k * panel + column];
    return;
  }
  const int64_t at = column < half ? 2 * column : 2 * (column - half) + 1;
  for (int64_t k = 0; k < n; ++k) out[k] = element(head.data, Type::bf16, first + k * panel + at);
}

}  // namespace specinfer
