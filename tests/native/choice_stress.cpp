// Noise, choices, nuclei and picks of rows that are exactly as long as they say: a choice is the best of logits and noise,
// and the sanitisers find nothing.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "choice.h"

using namespace specinfer;

static void check(bool ok, const char* what) {
  if (ok) return;
  std::puts(what);
  std::abort();
}

int main() {
  std::mt19937 rng(1);
  for (int64_t n : {1, 2, 3, 127, 128, 129, 1000, 4099})
    for (uint32_t position : {0u, 1u, 4095u}) {
      const NoiseKey key{0xfedcba9876543210u, 3, position};
      std::vector<float> logits(n), noise(n);
      for (float& x : logits) x = float(int(rng() % 20001) - 10000) / 1000.0f;
      if (n > 2) logits[n / 2] = -std::numeric_limits<float>::infinity();
      gumbel(key, n, noise.data());
      const float divisor = 0.7f;
      int64_t best = 0;
      for (int64_t i = 0; i < n; ++i)
        if (logits[i] / divisor + noise[i] > logits[best] / divisor + noise[best]) best = i;
      check(choose(logits.data(), n, divisor, key) == best, "not the best");
      for (int count : {1, 3, 200}) {
        std::vector<int64_t> columns(count);
        std::vector<double> shares(count);
        const int found = pick(logits.data(), n, count, columns.data(), shares.data());
        check(found == std::min<int64_t>(count, n - (n > 2)), "not as many picks as there are");
        for (int i = 1; i < found; ++i) {
          const float before = logits[columns[i - 1]], here = logits[columns[i]];
          check(before > here || (before == here && columns[i - 1] < columns[i]), "picks are not in order");
        }
        check(logits[columns[0]] == *std::max_element(logits.begin(), logits.end()), "not the largest");
      }
      for (double top_p : {1e-9, 0.5, 0.9, 1.0})
        for (int64_t top_k : {0, 1, 7, 256, 300})
          for (float min_p : {0.0f, 0.1f}) {
            std::vector<float> kept = logits;
            const bool is_sure = narrow(kept.data(), n, std::log(min_p), top_k, top_p);
            check(!is_sure || *std::max_element(kept.begin(), kept.end()) ==
                                  *std::max_element(logits.begin(), logits.end()), "the largest is not kept");
            check(top_k <= 256 || !is_sure, "more than can be kept");
          }
    }
  std::puts("ok");
}
