// Made-up weights for the programs beside this file.
#pragma once
#include <cstring>
#include <random>
#include <vector>

#include "packing.h"

namespace specinfer {

inline std::mt19937 rng(1);

inline std::vector<float> uniform(int64_t n) {
  std::vector<float> values(n);
  for (float& v : values) v = float(int(rng() % 2001) - 1000) / 1000.0f;
  return values;
}

// Rows as a checkpoint holds them, in fp32 or blocks; exactly as long, so that a byte read behind them is found.
inline std::vector<char> tensor(Type type, int64_t rows, int64_t columns) {
  if (!is_quantized(type)) {
    const std::vector<float> values = uniform(rows * columns);
    const char* bytes = reinterpret_cast<const char*>(values.data());
    return {bytes, bytes + 4 * values.size()};
  }
  const int64_t unit = stored_bytes(type, unit_inputs(type));
  std::vector<char> units(rows * stored_bytes(type, columns));
  for (char& byte : units) byte = char(rng());
  for (size_t at = type == Type::q6_k ? unit - 2 : 0; at < units.size(); at += unit)
    for (int i = 0; i < unit_numbers(type); ++i) {
      const uint16_t small = uint16_t((unit_inputs(type) == 32 ? 0x2000 : 0x0800) + rng() % 512);
      std::memcpy(units.data() + at + 2 * i, &small, 2);
    }
  return units;
}

}  // namespace specinfer
