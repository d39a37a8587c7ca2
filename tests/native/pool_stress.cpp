// Random jobs on pools of several sizes: every chunk once, no phase before the one before it is done.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "pool.h"

using namespace specinfer;

struct Counting : Job {
  std::vector<std::vector<int>> hits;
  int chunks(int phase) override { return phase < int(hits.size()) ? int(hits[phase].size()) : -1; }
  void run(int phase, int chunk, int) override {
    if (phase > 0) check(phase - 1);
    ++hits[phase][chunk];
  }
  void check(int phase) const {
    for (int n : hits[phase])
      if (n != 1) {
        std::puts("a chunk ran too often, too late or not at all");
        std::abort();
      }
  }
};

static void run_random(Pool& pool, unsigned& seed) {
  Counting job;
  for (int phases = rand_r(&seed) % 40; phases > 0; --phases)
    job.hits.emplace_back(rand_r(&seed) % 5 == 0 ? 0 : rand_r(&seed) % 30);
  pool.run(job);
  for (int phase = 0; phase < int(job.hits.size()); ++phase) job.check(phase);
}

int main() {
  unsigned seed = 1;
  for (int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    for (int i = 0; i < 200; ++i) {
      run_random(pool, seed);
      if (i % 50 == 0) usleep(3000);  // long enough for the threads to sleep
    }
  }
  std::vector<std::thread> callers;
  for (unsigned k = 0; k < 3; ++k)
    callers.emplace_back([k] {
      for (unsigned i = 0, own = k; i < 100; ++i) run_random(shared_pool(2), own);
    });
  for (auto& caller : callers) caller.join();
  std::puts("ok");
  std::fflush(stdout);
  _exit(0);
}
