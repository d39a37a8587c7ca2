// The target's choice: a row of noise, temperature, noise and argmax in one pass over a row of logits, what top_p
// keeps of it, and a draft's children. The same bits as sampling/noise.py, which says how the noise is made,
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

// The smallest set of largest values whose share in the softmax of x reaches `share`: its last value and its size.
// Where rounding could decide, size is 0: sampling/filters.py, whose sums are exact, must look. n > 0, no NaN, one
// value above -inf.
struct Nucleus {
  float bound;
  int64_t size;
};
Nucleus nucleus(const float* x, int64_t n, double share);

}  // namespace specinfer
