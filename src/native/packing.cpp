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

// The nearest fp16 of a number in [0, 65520), the even one on a tie.
static uint16_t to_half(float x) {
  if (x < 6.103515625e-5f) return uint16_t(std::nearbyint(x * 16777216.0f));  // 2^-14: steps of 2^-24 below
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t(((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10));
}

float element(const void* data, Type type, int64_t i) {
  if (type == Type::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == Type::bf16 ? from_bits(uint32_t(bits) << 16) : half_to_float(bits);
}

// Where input k of a column is within the integers of its block, and how far up in its byte.
static int64_t byte_of(Type type, int panel, int64_t column, int64_t k) {
  if (!has_nibbles(type)) return k / 2 * 2 * panel + 2 * column + k % 2;
  return k / 4 * 2 * panel + column % (panel / 2) * 4 + k % 4;
}
static int shift_of(int panel, int64_t column) { return column < panel / 2 ? 0 : 4; }

static int64_t bf16_place(int panel, int64_t column) {
  const int half = panel / 2;
  return column < half ? 2 * column : 2 * (column - half) + 1;
}

// Q8_0: a scale, 32 integers. Q4_0: a scale, 16 bytes of nibbles, inputs 0 to 15 low. Q4_1: a minimum after the scale.
static void pack_blocks(char* to, int panel, int64_t column, const uint8_t* from, Type type, int64_t inputs) {
  const int numbers = type == Type::q4_1 ? 2 : 1;
  const int64_t step = block_bytes(type, panel);
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

// A Q8_0 block of BLOCK elements from `start` on.
static void make_block(const void* from, Type type, int64_t start, uint8_t* block) {
  float x[BLOCK], largest = 0.0f;
  for (int k = 0; k < BLOCK; ++k) {
    x[k] = element(from, type, start + k);
    if (!std::isfinite(x[k])) throw std::runtime_error("a weight is not a number");
    largest = std::fmax(largest, std::fabs(x[k]));
  }
  const float scale = largest / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  if (scale >= 65520.0f) throw std::runtime_error("a weight is too large for 8 bits");
  const uint16_t half = to_half(scale);
  std::memcpy(block, &half, 2);
  for (int k = 0; k < BLOCK; ++k) block[2 + k] = uint8_t(int8_t(std::round(x[k] * inverse)));
}

void pack(const Linear& l, int panel, int64_t which, int64_t column, const void* from, Type type) {
  char* to = l.data + which * panel_bytes(l.type, l.inputs, panel);
  if (is_quantized(type)) {
    if (type != l.type) throw std::invalid_argument("blocks of one type do not go into panels of another");
    pack_blocks(to, panel, column, static_cast<const uint8_t*>(from), type, l.inputs);
  } else if (l.type == Type::q8_0) {
    uint8_t block[2 + BLOCK];
    for (int64_t k = 0; k < l.inputs; k += BLOCK, to += block_bytes(l.type, panel)) {
      make_block(from, type, k, block);
      pack_blocks(to, panel, column, block, l.type, BLOCK);
    }
  } else if (l.type == Type::f32) {
    float* out = reinterpret_cast<float*>(to) + column;
    for (int64_t k = 0; k < l.inputs; ++k) out[k * panel] = element(from, type, k);
  } else if (l.type == Type::bf16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(to) + bf16_place(panel, column);
    for (int64_t k = 0; k < l.inputs; ++k) out[k * panel] = to_bf16(element(from, type, k));
  } else {
    throw std::invalid_argument("panels of blocks are made of blocks only");
  }
}

void unpack(const Linear& l, int panel, int64_t which, int64_t column, float* out) {
  const char* from = l.data + which * panel_bytes(l.type, l.inputs, panel);
  if (!is_quantized(l.type)) {
    const int64_t at = l.type == Type::f32 ? column : bf16_place(panel, column);
    for (int64_t k = 0; k < l.inputs; ++k) out[k] = element(from, l.type, k * panel + at);
    return;
  }
  for (int64_t start = 0; start < l.inputs; start += BLOCK, from += block_bytes(l.type, panel)) {
    const float scale = element(from, Type::f16, column);
    const float minimum = l.type == Type::q4_1 ? element(from, Type::f16, panel + column) : 0.0f;
    for (int64_t k = 0; k < BLOCK; ++k) {
      const int byte = from[header_bytes(l.type, panel) + byte_of(l.type, panel, column, k)];
      const int nibble = (byte >> shift_of(panel, column)) & 15;
      const int q = !has_nibbles(l.type) ? int(int8_t(byte)) : l.type == Type::q4_0 ? nibble - 8 : nibble;
      out[start + k] = scale * float(q) + minimum;
    }
  }
}

}  // namespace specinfer
