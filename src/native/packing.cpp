#include "packing.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace specinfer {

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

float element(const void* data, Type type, int64_t i) {
  if (type == Type::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == Type::f16 ? half_to_float(bits) : from_bits(uint32_t(bits) << 16);
}

// Where input k of a column is within the integers of its block, and how far up in its byte.
static int64_t byte_of(Type type, int panel, int64_t column, int64_t k) {
  if (!has_nibbles(type)) return k / 2 * 2 * panel + 2 * column + k % 2;
  return k / 4 * 2 * panel + column % (panel / 2) * 4 + k % 4;
}
static int shift_of(int panel, int64_t column) { return column < panel / 2 ? 0 : 4; }

// Where input k of a column is within a panel of fp32 or bf16.
static int64_t place_of(Type type, int panel, int64_t column, int64_t k) {
  const int half = panel / 2;
  if (type == Type::f32) return k * panel + column;
  if (type == Type::bf16_pairs) return k / 2 * 2 * panel + 2 * column + k % 2;
  return k * panel + (column < half ? 2 * column : 2 * (column - half) + 1);
}

static void pack_int8(char* to, int panel, int64_t column, const void* from, Type type, int64_t inputs) {
  float largest = 0.0f;
  for (int64_t k = 0; k < inputs; ++k) {
    const float size = std::fabs(element(from, type, k));
    if (!std::isfinite(size)) throw std::runtime_error("a weight is not a number");
    largest = size > largest ? size : largest;
  }
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = inverse > 0.0f ? largest / 127.0f : 0.0f;
  std::memcpy(to + 4 * column, &scale, 4);
  to += header_bytes(Type::int8, panel);
  for (int64_t k = 0; k < inputs; ++k)
    to[byte_of(Type::int8, panel, column, k)] = char(std::nearbyint(element(from, type, k) * inverse));
}

// Q8_0: a scale, 32 integers. Q4_0: a scale, 16 bytes of nibbles, inputs 0 to 15 low. Q4_1: a minimum after the scale.
static void pack_blocks(char* to, int panel, int64_t column, const uint8_t* from, Type type, int64_t inputs) {
  const int numbers = type == Type::q4_1 ? 2 : 1;
  const int64_t step = block_bytes(type, inputs, panel);
  for (int64_t b = 0; b < inputs / BLOCK; ++b, to += step) {
    for (int i = 0; i < numbers; ++i, from += 2) {
      uint16_t number;
      std::memcpy(&number, from, 2);
      if (!std::isfinite(half_to_float(number))) throw std::runtime_error("a block's scale is not a number");
      std::memcpy(to + 2 * (i * panel + column), &number, 2);
    }
    char* integers = to + header_bytes(type, panel);
    if (has_nibbles(type)) {
      for (int k = 0; k < BLOCK; ++k) {
        const int nibble = k < 16 ? from[k] & 15 : from[k - 16] >> 4;
        integers[byte_of(type, panel, column, k)] |= char(nibble << shift_of(panel, column));
      }
      from += BLOCK / 2;
    } else {
      for (int k = 0; k < BLOCK; ++k) integers[byte_of(type, panel, column, k)] = char(from[k]);
      from += BLOCK;
    }
  }
}

void pack(const Linear& l, int panel, int64_t which, int64_t column, const void* from, Type type) {
  char* to = l.data + which * panel_bytes(l.type, l.inputs, panel);
  if (is_quantized(type)) {
    if (type != l.type) throw std::invalid_argument("blocks of one type do not go into panels of another");
    pack_blocks(to, panel, column, static_cast<const uint8_t*>(from), type, l.inputs);
  } else if (l.type == Type::int8) {
    pack_int8(to, panel, column, from, type, l.inputs);
  } else if (l.type == Type::f32) {
    float* out = reinterpret_cast<float*>(to);
    for (int64_t k = 0; k < l.inputs; ++k) out[place_of(l.type, panel, column, k)] = element(from, type, k);
  } else if (l.type == Type::bf16 || l.type == Type::bf16_pairs) {
    uint16_t* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < l.inputs; ++k) out[place_of(l.type, panel, column, k)] = to_bf16(element(from, type, k));
  } else {
    throw std::invalid_argument("panels of blocks are made of blocks only");
  }
}

void unpack(const Linear& l, int panel, int64_t which, int64_t column, float* out) {
  const char* from = l.data + which * panel_bytes(l.type, l.inputs, panel);
  if (!is_quantized(l.type)) {
    for (int64_t k = 0; k < l.inputs; ++k) out[k] = element(from, l.type, place_of(l.type, panel, column, k));
    return;
  }
  const int64_t block = block_inputs(l.type, l.inputs), header = header_bytes(l.type, panel);
  for (int64_t start = 0; start < l.inputs; start += block, from += block_bytes(l.type, l.inputs, panel)) {
    const float scale = element(from, l.type == Type::int8 ? Type::f32 : Type::f16, column);
    const float minimum = l.type == Type::q4_1 ? element(from, Type::f16, panel + column) : 0.0f;
    for (int64_t k = 0; k < block && start + k < l.inputs; ++k) {
      const int byte = from[header + byte_of(l.type, panel, column, k)];
      const int nibble = (byte >> shift_of(panel, column)) & 15;
      const int q = !has_nibbles(l.type) ? int(int8_t(byte)) : l.type == Type::q4_0 ? nibble - 8 : nibble;
      out[start + k] = scale * float(q) + minimum;
    }
  }
}

}  // namespace specinfer
