#include "choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace specinfer {

#define INLINE static inline __attribute__((always_inline))
// Every operation below is exact or rounds as IEEE says, so that all instruction sets give the same bits.
#if defined(__x86_64__) && defined(__GLIBC__)
#define BEST_OF_CPU __attribute__((target_clones("avx2", "default")))
#else
#define BEST_OF_CPU
#endif

constexpr int COUNTERS = 32;
constexpr int BLOCK = 4 * COUNTERS;  // tokens
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int LARGEST_TOP_K = 256;  // that leading() is quick for

// Philox4x32-10: the random words of tokens [first, first + BLOCK); first is a multiple of 4.
INLINE void philox(const NoiseKey& key, int64_t first, uint32_t* words) {
  uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
  for (int i = 0; i < COUNTERS; ++i) {
    c0[i] = uint32_t(first / 4 + i);
    c1[i] = key.sample_index;
    c2[i] = key.position;
    c3[i] = 0x67756D62;
  }
  uint32_t k0 = uint32_t(key.seed), k1 = uint32_t(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
#pragma GCC unroll 1  // unrolled, it is not vectorised
    for (int i = 0; i < COUNTERS; ++i) {
      const uint64_t p0 = uint64_t(0xD2511F53) * c0[i], p1 = uint64_t(0xCD9E8D57) * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(p1);
      c3[i] = uint32_t(p0);
    }
  for (int i = 0; i < COUNTERS; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

INLINE double as_double(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// n < 2^52, exactly: registers have no conversion of 64-bit integers before AVX-512.
INLINE double to_double(uint64_t n) { return as_double(0x4330000000000000 | n) - 0x1p52; }

INLINE double nlog(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  // e + 1024, which is positive: the one shift to the right that registers have is unsigned.
  const uint64_t raised = (bits - 0x3FE6A09E667F3BCD + (uint64_t(1024) << 52)) >> 52;
  const double e = to_double(raised) - 1024.0;
  const double m = as_double(bits - ((raised - 1024) << 52));
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double r = -1.479819860511658591e-01;
  r = r * z + -1.531383769920937332e-01;
  r = r * z + -1.818357216161805012e-01;
  r = r * z + -2.222219843214978396e-01;
  r = r * z + -2.857142874366239149e-01;
  r = r * z + -3.999999999940941908e-01;
  r = r * z + -6.666666666666735130e-01;
  r = r * z + -2.0;
  return (e * -1.90821492927058770002e-10 + r * s) + e * -6.93147180369123816490e-01;
}

INLINE float gumbel_of(uint32_t word) { return float(nlog(nlog((to_double(word) + 0.5) * 0x1p-32))); }

// At least gumbel_of(word), and not much more where that is large. -ln(u) >= 1 - u >= r / 2^31 with r as below, and
// the bits of a positive float, taken for a fixed-point number, are never above its binary logarithm + 127. Checked
// for all 2^32 words.
INLINE float bound_of(uint32_t word) {
  const float r = float(int32_t(~word >> 1));
  int32_t bits;
  std::memcpy(&bits, &r, 4);
  constexpr float LN2 = 0.69314718f, SLACK = 0.01f;
  return (31 + 127) * LN2 + SLACK - float(bits) * (LN2 / (1 << 23));
}

BEST_OF_CPU void gumbel(const NoiseKey& key, int64_t n, float* out) {
  for (int64_t first = 0; first < n; first += BLOCK) {
    uint32_t words[BLOCK];
    float g[BLOCK];
    philox(key, first, words);
    for (int i = 0; i < BLOCK; ++i) g[i] = gumbel_of(words[i]);
    std::memcpy(out + first, g, sizeof(float) * size_t(std::min<int64_t>(BLOCK, n - first)));
  }
}

// Words and bounds for every token; logarithms for the few that could beat the best one so far.
BEST_OF_CPU int64_t choose(const float* logits, int64_t n, float divisor, const NoiseKey& key) {
  float best = -INF;
  int64_t choice = 0;
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int size = int(std::min<int64_t>(BLOCK, n - first));
    uint32_t words[BLOCK];
    float x[BLOCK], largest[BLOCK];
    std::fill(x, x + BLOCK, -INF);
    int num_kept = 0, num_near = 0;
    for (int i = 0; i < size; ++i) x[i] = logits[first + i] / divisor;
    for (int i = 0; i < BLOCK; ++i) num_kept += x[i] > -INF;
    if (num_kept == 0) continue;
    philox(key, first, words);
    for (int i = 0; i < BLOCK; ++i) {
      largest[i] = x[i] + bound_of(words[i]);
      num_near += largest[i] > best;
    }
    for (int i = 0; num_near && i < size; ++i) {
      if (largest[i] <= best) continue;
      const float score = x[i] + gumbel_of(words[i]);
      if (score > best) {
        best = score;
        choice = first + i;
      }
    }
  }
  return choice;
}

// e^x for x <= 0, e^-87 below -87; relative error below 1e-14.
INLINE double exp_of(double x) {
  constexpr double MAGIC = 0x1.8p52;  // adding it rounds to an integer, which stands in the last bits
  const double y = x > -87.0 ? x : -87.0, shifted = y * 1.44269504088896338700e+00 + MAGIC, n = shifted - MAGIC;
  const double r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0;
#pragma GCC unroll 11
  for (int k = 11; k > 0; --k) p = p * r * (1.0 / k) + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  return p * as_double((bits + 1023) << 52);
}

// e^x for x <= 0, e^-87 below -87; relative error below 1e-6.
INLINE float estimate_exp(float x) {
  constexpr float MAGIC = 0x1.8p23f;
  const float y = x > -87.0f ? x : -87.0f, shifted = y * 1.44269504f + MAGIC, n = shifted - MAGIC;
  const float r = (y - n * 0.693145752f) - n * 1.42860677e-06f;
  float p = 1.0f;
#pragma GCC unroll 6
  for (int k = 6; k > 0; --k) p = p * r * (1.0f / float(k)) + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// The largest of x[0 .. n - 1].
INLINE float largest_of(const float* x, int64_t n) {
  float lanes[BLOCK];
  std::fill(lanes, lanes + BLOCK, -INF);
  for (int64_t first = 0; first < n; first += BLOCK)
    for (int i = 0, size = int(std::min<int64_t>(BLOCK, n - first)); i < size; ++i)
      lanes[i] = x[first + i] > lanes[i] ? x[first + i] : lanes[i];
  return *std::max_element(lanes, lanes + BLOCK);
}

// The columns of the `count` largest values above -inf, in order; how many there are. Most blocks have nothing above
// the least of those found.
INLINE int leading(const float* x, int64_t n, int count, int64_t* columns) {
  int found = 0;
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int size = int(std::min<int64_t>(BLOCK, n - first));
    float least = found < count ? -INF : x[columns[count - 1]];
    int num_above = 0;
    for (int i = 0; i < size; ++i) num_above += x[first + i] > least;
    for (int i = 0; num_above && i < size; ++i) {
      const float value = x[first + i];
      if (!(value > least)) continue;
      int at = found < count ? found++ : count - 1;
      for (; at > 0 && x[columns[at - 1]] < value; --at) columns[at] = columns[at - 1];
      columns[at] = first + i;
      least = found < count ? -INF : x[columns[count - 1]];
    }
  }
  return found;
}

BEST_OF_CPU int pick(const float* x, int64_t n, int count, int64_t* columns, double* shares) {
  const int found = count < 1 ? 0 : leading(x, n, count, columns);
  if (found == 0) return 0;
  const float largest = x[columns[0]];
  double total = 0.0;
  for (int64_t first = 0; first < n; first += BLOCK) {
    float shares_of_block[8] = {};
    int64_t i = first;
    const int64_t end = std::min(first + BLOCK, n);
    for (; i + 8 <= end; i += 8)
      for (int lane = 0; lane < 8; ++lane) shares_of_block[lane] += estimate_exp(x[i + lane] - largest);
    for (; i < end; ++i) shares_of_block[0] += estimate_exp(x[i] - largest);
    for (float share : shares_of_block) total += share;
  }
  for (int i = 0; i < found; ++i) shares[i] = estimate_exp(x[columns[i]] - largest) / total;
  return found;
}

// How far sums of n weights may be from those in sampling/filters.py, which are of weights cut to multiples of 2^-40.
INLINE double doubt_of(int64_t n, double total) { return 2.0 * double(n) * 0x1p-40 + 1e-12 * total; }

// The smallest set of largest values whose share in the softmax of x reaches `share`: its last value and its size, 0
// where rounding could decide.
struct Nucleus {
  float bound;
  int64_t size;
};

// By buckets of values: the one in which the share is reached is sorted.
INLINE Nucleus nucleus(const float* x, int64_t n, float largest, double share) {
  constexpr int BUCKETS = 1024;
  constexpr float PER_UNIT = 32.0f;
  std::vector<uint16_t> bucket_of(static_cast<size_t>(n));
  double weights[BUCKETS] = {}, others[BUCKETS] = {}, total = 0.0;
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int size = int(std::min<int64_t>(BLOCK, n - first));
    double w[BLOCK];
    float place[BLOCK];
    for (int i = 0; i < size; ++i) {
      const float below = (largest - x[first + i]) * PER_UNIT;
      w[i] = exp_of(double(x[first + i]) - double(largest));
      place[i] = below < BUCKETS - 1 ? below : BUCKETS - 1;
    }
    for (int i = 0; i < size; ++i) bucket_of[size_t(first + i)] = uint16_t(place[i]);
    // Neighbours' sums need not wait for each other.
    for (int i = 0; i < size; ++i) (i % 2 ? others : weights)[int(place[i])] += w[i];
  }
  for (int b = 0; b < BUCKETS; ++b) total += weights[b] += others[b];
  const double wanted = share * total, doubt = doubt_of(n, total);
  double before = 0.0;  // the weight of what is kept
  int bucket = 0;
  for (; bucket + 1 < BUCKETS && before + weights[bucket] < wanted; ++bucket) before += weights[bucket];
  int64_t kept = 0;
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) kept += bucket_of[size_t(i)] < bucket;
  for (int64_t i = 0; i < n; ++i)
    if (bucket_of[size_t(i)] == bucket) values.push_back(x[i]);
  std::sort(values.begin(), values.end(), std::greater<float>());
  float bound = largest;
  for (float value : values) {
    if (std::fabs(before - wanted) <= doubt) return {bound, 0};
    if (before > wanted) return {bound, kept};
    before += exp_of(double(value) - double(largest));
    bound = value;
    ++kept;
  }
  return {bound, before > wanted + doubt ? kept : 0};
}

// How many of `count` values in falling order have a share of `share` in their softmax; 0 where rounding could decide.
INLINE int leading_share(const float* values, int count, double share) {
  double weights[LARGEST_TOP_K], total = 0.0, before = 0.0;
  for (int i = 0; i < count; ++i) total += weights[i] = exp_of(double(values[i]) - double(values[0]));
  const double wanted = share * total, doubt = doubt_of(count, total);
  for (int i = 0; i < count; ++i) {
    if (std::fabs(before - wanted) <= doubt) return 0;
    if (before > wanted) return i;
    before += weights[i];
  }
  return before > wanted + doubt ? count : 0;
}

BEST_OF_CPU bool narrow(float* x, int64_t n, float log_min_p, int64_t top_k, double top_p) {
  const float largest = largest_of(x, n), least = largest + log_min_p;
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] >= least ? x[i] : -INF;
  if (top_k > 0) {
    if (top_k > LARGEST_TOP_K) return false;
    int64_t columns[LARGEST_TOP_K];
    float values[LARGEST_TOP_K];
    int found = leading(x, n, int(top_k), columns);
    for (int i = 0; i < found; ++i) values[i] = x[columns[i]];
    if (top_p < 1.0 && (found = leading_share(values, found, top_p)) == 0) return false;
    std::fill(x, x + n, -INF);
    for (int i = 0; i < found; ++i) x[columns[i]] = values[i];
  } else if (top_p < 1.0) {
    const Nucleus kept = nucleus(x, n, largest, top_p);
    if (kept.size == 0) return false;
    int64_t num_equal = kept.size;
    for (int64_t i = 0; i < n; ++i) num_equal -= x[i] > kept.bound;
    for (int64_t i = 0; i < n; ++i)
      if (x[i] < kept.bound || (x[i] == kept.bound && --num_equal < 0)) x[i] = -INF;
  }
  return true;
}

}  // namespace specinfer
