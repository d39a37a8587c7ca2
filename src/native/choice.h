// The target's choice: a row of noise, temperature, noise and argmax in one pass over a row of logits, what
// filters keep of it, and a draft's children. The same bits as sampling/noise.py, which says how the noise is made,
// sampling/chooser.py and sampling/filters.py; the same columns as sampling/pick.py.
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

// The `count` largest values above -inf, the first column of equals first: their columns, and their shares in the
// softmax of x. Returns how many there are; no NaN.
int pick(const float* x, int64_t n, int count, int64_t* columns, double* shares);

// Leaves of a row what min_p, top_k and top_p keep, each among what the one before it left, and -inf elsewhere; a
// log_min_p of -inf, a top_k of 0 and a top_p of 1 keep all. False, and the row is spoilt, where rounding could decide or
// top_k is above 256: sampling/filters.py, whose sums are exact, must look. n > 0, no NaN, one value above -inf.
bool narrow(float* x, int64_t n, float log_min_p, int64_t top_k, double top_p);

}  // namespace specinfer
