// Noise, choices and nuclei of rows that are exactly as long as they say: a choice is the best of logits and noise,
// and the sanitisers find nothing.
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
      for (double share : {1e-9, 0.5, 0.9, 1.0}) {
        const Nucleus found = nucleus(logits.data(), n, share);
        check(found.size >= 0 && found.size <= n && std::isfinite(found.bound), "no nucleus");
      }
    }
  std::puts("ok");
}
