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
  return type == Type::f16 ? half_to_float(bits) : from_bits(uint32_t(bits) << 16);
}

// Where input k of a column is within the integers of its block, and how far up in its byte.
static int64_t byte_of(Type type, int panel, int64_t column, int64_t k) {
  if (has_quads(type)) return k / 4 * 4 * panel + 4 * column + k % 4;
  if (!has_nibbles(type)) return k / 2 * 2 * panel + 2 * column + k % 2;
  return k / 4 * 2 * panel + column % (panel / 2) * 4 + k % 4;
}
static int offset_of(Type type) { return has_quads(type) ? 128 : 0; }
static int shift_of(Type type, int panel, int64_t column) { return has_nibbles(type) && column >= panel / 2 ? 4 : 0; }

// Where input k of a column is within a panel of fp32 or bf16.
static int64_t place_of(Type type, int panel, int64_t column, int64_t k) {
  const int half = panel / 2;
  if (type == Type::f32) return k * panel + column;
  if (type == Type::bf16_pairs) return k / 2 * 2 * panel + 2 * column + k % 2;
  return k * panel + (column < half ? 2 * column : 2 * (column - half) + 1);
}

// A unit as GGUF stores it.
//   Q8_0, Q4_0, Q4_1: its numbers, then 32 integers, or 16 bytes of nibbles, the first 16 inputs low.
//   Q4_K: its numbers; 12 bytes of 8 scales and 8 minima, 6 bits each; for every 64 inputs 32 bytes, the first 32 low.
//   Q6_K: for every 128 inputs 64 bytes of low nibbles, the first 64 inputs low; 32 bytes for every 128, each the upper
//   2 bits of 4 inputs that are 32 apart; 16 scales; its number.
template <Type T>
struct Stored {
  const uint8_t* unit;

  const uint8_t* numbers() const { return unit + (T == Type::q6_k ? 208 : 0); }

  // Number i of block b: the scale, then the minimum.
  uint8_t block_number(int b, int i) const {
    if (T == Type::q6_k) return unit[192 + b];
    const uint8_t* six = unit + 4;
    const int at = b % 4 + 4 * i;
    return b < 4 ? six[at] & 63 : (i ? six[8 + b % 4] >> 4 : six[8 + b % 4] & 15) | (six[at] >> 6) << 4;
  }

  // In q4_0 it is 8 more than what it stands for.
  int integer(int k) const {
    if (T == Type::q8_0) return int8_t(unit[2 + k]);
    if (T == Type::q6_k) {
      const int low = unit[k / 128 * 64 + k % 64] >> (k % 128 / 64 * 4) & 15;
      const int high = unit[128 + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
      return (low | high << 4) - 32;
    }
    if (T == Type::q4_k) return unit[16 + k / 64 * 32 + k % 32] >> (k % 64 / 32 * 4) & 15;
    return unit[2 * unit_numbers(T) + k % 16] >> (k / 16 * 4) & 15;
  }
};

// T: as the file has it; `type`: as it shall lie.
template <Type T>
static void pack_units(char* to, Type type, int panel, int64_t column, const uint8_t* from, int64_t inputs) {
  for (; inputs > 0; inputs -= unit_inputs(T), from += stored_bytes(T, unit_inputs(T))) {
    const Stored<T> stored{from};
    for (int i = 0; i < unit_numbers(T); ++i, to += 2 * panel) {
      uint16_t number;
      std::memcpy(&number, stored.numbers() + 2 * i, 2);
      if (!std::isfinite(half_to_float(number))) throw std::runtime_error("a block's scale is not a number");
      std::memcpy(to + 2 * column, &number, 2);
    }
    for (int start = 0; start < unit_inputs(T); start += block_inputs(T)) {
      for (int i = 0; i < block_numbers(T); ++i, to += panel)
        to[column] = char(stored.block_number(start / block_inputs(T), i));
      for (int k = 0; k < block_inputs(T); ++k)
        to[byte_of(type, panel, column, k)] |=
            char((stored.integer(start + k) + offset_of(type)) * (1 << shift_of(T, panel, column)));
      to += block_inputs(T) * panel / (has_nibbles(T) ? 2 : 1);
    }
  }
}

static void pack_stored(char* to, Type type, int panel, int64_t column, const void* from, int64_t inputs) {
  const uint8_t* units = static_cast<const uint8_t*>(from);
  switch (stored_type(type)) {
    case Type::q8_0: return pack_units<Type::q8_0>(to, type, panel, column, units, inputs);
    case Type::q4_0: return pack_units<Type::q4_0>(to, type, panel, column, units, inputs);
    case Type::q4_1: return pack_units<Type::q4_1>(to, type, panel, column, units, inputs);
    case Type::q4_k: return pack_units<Type::q4_k>(to, type, panel, column, units, inputs);
    default: return pack_units<Type::q6_k>(to, type, panel, column, units, inputs);
  }
}

// A Q8_0 unit of elements from `start` on.
static void make_q8_0(const void* from, Type type, int64_t start, uint8_t* unit) {
  float x[32], largest = 0.0f;
  for (int k = 0; k < 32; ++k) {
    x[k] = element(from, type, start + k);
    if (!std::isfinite(x[k])) throw std::runtime_error("a weight is not a number");
    largest = std::fmax(largest, std::fabs(x[k]));
  }
  const float scale = largest / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  if (scale >= 65520.0f) throw std::runtime_error("a weight is too large for 8 bits");
  const uint16_t half = to_half(scale);
  std::memcpy(unit, &half, 2);
  for (int k = 0; k < 32; ++k) unit[2 + k] = uint8_t(int8_t(std::round(x[k] * inverse)));
}

void pack(const Linear& l, int panel, int64_t which, int64_t column, const void* from, Type type) {
  char* to = l.data + which * panel_bytes(l.type, l.inputs, panel);
  if (is_quantized(type)) {
    if (type != stored_type(l.type)) throw std::invalid_argument("blocks of one type do not go into panels of another");
    pack_stored(to, l.type, panel, column, from, l.inputs);
  } else if (stored_type(l.type) == Type::q8_0) {
    uint8_t unit[34];
    for (int64_t k = 0; k < l.inputs; k += 32, to += unit_bytes(l.type, panel)) {
      make_q8_0(from, type, k, unit);
      pack_stored(to, l.type, panel, column, unit, 32);
    }
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
  const Type t = l.type;
  for (int64_t start = 0; start < l.inputs; start += unit_inputs(t)) {
    const float unit_scale = element(from, Type::f16, column);
    const float unit_minimum = unit_numbers(t) == 2 ? element(from, Type::f16, panel + column) : 0.0f;
    from += 2 * unit_numbers(t) * panel;
    for (int b = 0; b < unit_inputs(t); b += block_inputs(t), from += block_bytes(t, panel)) {
      const float scale = block_numbers(t) ? unit_scale * float(int8_t(from[column])) : unit_scale;
      const float minimum = t == Type::q4_k ? -(unit_minimum * float(from[panel + column])) : unit_minimum;
      const char* integers = from + block_numbers(t) * panel;
      for (int k = 0; k < block_inputs(t); ++k) {
        const int byte = integers[byte_of(t, panel, column, k)];
        const int nibble = (byte >> shift_of(t, panel, column)) & 15;
        const int q = !has_nibbles(t) ? int(int8_t(byte ^ offset_of(t))) : t == Type::q4_0 ? nibble - 8 : nibble;
        out[start + b + k] = scale * float(q) + minimum;
      }
    }
  }
}

}  // namespace specinfer
