// The target's choice: a row of noise, and temperature, noise and argmax in one pass over a row of logits. The same bits
// as sampling/noise.py, which says how the noise is made, and as sampling/chooser.py.
#pragma once
#include <cstdint>

namespace specinfer {

// What a row of noise depends on.
struct NoiseKey {
  uint64_t seed;
  uint32_t sample_index;
  uint32_t position;
};

// The noise of tokens [0, n).
void gumbel(const NoiseKey& key, int64_t n, float* out);

// The first column that has the largest logits[i] / divisor + noise[i]; n > 0, no NaN.
int64_t choose(const float* logits, int64_t n, float divisor, const NoiseKey& key);

}  // namespace specinfer
