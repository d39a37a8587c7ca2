#include "pool.h"

#include <unistd.h>

#include <map>
#include <memory>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specinfer {

constexpr int SPINS = 1000;  // pauses of 20 to 40 ns before a waiting thread lets others run

static void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Pool::Pool(int threads) : process_(getpid()) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { loop(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Pool::try_chunk(int worker) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  uint32_t next, total;
  do {
    next = ticket & 0xffff;
    total = (ticket >> 16) & 0xffff;
    if (next >= total) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  job_->run(phase_, int(next), worker);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == total) {
    done_.store(0, std::memory_order_relaxed);
    advance(worker);
  }
  return true;
}

// Opens the next phase that is worth sharing, after running the smaller ones here.
void Pool::advance(int worker) {
  for (;;) {
    const int n = job_->chunks(++phase_);
    if (n < 0) {
      active_.store(false, std::memory_order_release);
      return;
    }
    if (n > 1 && !alone_) {
      ticket_.store(++serial_ << 32 | uint64_t(n) << 16, std::memory_order_release);
      return;
    }
    for (int i = 0; i < n; ++i) job_->run(phase_, i, worker);
  }
}

void Pool::run(Job& job) {
  std::lock_guard<std::mutex> run_lock(run_mutex_);
  job_ = &job;
  phase_ = -1;
  alone_ = workers_.empty() || getpid() != process_;
  active_.store(true, std::memory_order_release);
  if (!alone_) {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      ++jobs_;
    }
    if (sleeping_.load() > 0) wake_.notify_all();
  }
  advance(0);
  for (int spins = 0; active_.load(std::memory_order_acquire);) {
    if (try_chunk(0))
      spins = 0;
    else if (++spins < SPINS)
      pause();
    else
      std::this_thread::yield();
  }
}

void Pool::loop(int worker) {
  int spins = 0;
  for (;;) {
    if (try_chunk(worker)) {
      spins = 0;
      continue;
    }
    if (++spins < SPINS) {
      pause();
      continue;
    }
    if (active_.load(std::memory_order_acquire)) {
      std::this_thread::yield();
      continue;
    }
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    const uint64_t seen = jobs_;
    if (active_.load(std::memory_order_acquire)) continue;
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return stop_ || jobs_ != seen; });
    sleeping_.fetch_sub(1);
    if (stop_) return;
    spins = 0;
  }
}

Pool& shared_pool(int threads) {
  static std::mutex mutex;
  static auto* pools = new std::map<int, std::unique_ptr<Pool>>();  // never destroyed: threads may outlive main
  std::lock_guard<std::mutex> lock(mutex);
  auto& pool = (*pools)[threads];
  if (!pool) pool = std::make_unique<Pool>(threads);
  return *pool;
}

}  // namespace specinfer
