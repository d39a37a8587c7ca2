#include "pool.h"

#include <unistd.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specinfer {

// Pauses of 20 to 40 ns before a waiting thread sleeps: longer than a fair wait for the others' last chunks. It
// sleeps rather than yields: on a busy machine a yield gives away a whole time slice.
constexpr int SPINS = 4000;

static void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Pool::Pool(int threads) : threads_(threads), shares_(new Share[threads]), process_(getpid()) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i, [this] { return stop_.load(); }); });
}

Pool::~Pool() {
  stop_.store(true);
  wake();
  for (auto& worker : workers_) worker.join();
}

void Pool::pin(const std::vector<int>& processors) {
#if defined(__linux__)
  for (size_t i = 1; i <= workers_.size() && i < processors.size(); ++i) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (processors[i] >= 0 && processors[i] < CPU_SETSIZE) CPU_SET(processors[i], &set);
    if (pthread_setaffinity_np(workers_[i - 1].native_handle(), sizeof set, &set) != 0)
      throw std::invalid_argument("no thread can be kept on processor " + std::to_string(processors[i]));
  }
#else
  throw std::invalid_argument("this system keeps no thread on a processor");
#endif
}

bool Pool::claim(Share& share, int& chunk) {
  uint64_t ticket = share.ticket.load(std::memory_order_acquire);
  do {
    if ((ticket & 0xffff) >= (ticket >> 16 & 0xffff)) return false;
  } while (!share.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  chunk = int(ticket & 0xffff);
  return true;
}

// Of the worker's own share, or else of those after it.
bool Pool::try_chunk(int worker) {
  int chunk = 0, tried = 0;
  while (tried < threads_ && !claim(shares_[(worker + tried) % threads_], chunk)) ++tried;
  if (tried == threads_) return false;
  const uint32_t total = total_;  // who ends the phase may already open another
  job_->run(phase_, chunk, worker);
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
      active_.store(false);
      wake();
      return;
    }
    if (n > 1 && !alone_) {
      total_ = uint32_t(n);
      ++serial_;
      for (int i = 0; i < threads_; ++i)
        shares_[i].ticket.store(serial_ << 32 | uint64_t(share(n, i + 1, threads_)) << 16 | uint64_t(share(n, i, threads_)));
      wake();
      return;
    }
    for (int i = 0; i < n; ++i) job_->run(phase_, i, worker);
  }
}

bool Pool::has_chunks() const {
  for (int i = 0; i < threads_; ++i) {
    const uint64_t ticket = shares_[i].ticket.load();
    if ((ticket & 0xffff) < (ticket >> 16 & 0xffff)) return true;
  }
  return false;
}

// A sleeper counts itself before it looks whether there is work; who makes work looks for sleepers after.
void Pool::wake() {
  if (sleeping_.load() == 0) return;
  { std::lock_guard<std::mutex> lock(sleep_mutex_); }
  wake_.notify_all();
}

// Works on chunks until `is_done`.
template <class Condition>
void Pool::work(int worker, Condition is_done) {
  for (int spins = 0; !is_done();) {
    if (try_chunk(worker)) {
      spins = 0;
    } else if (++spins < SPINS) {
      pause();
    } else {
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return has_chunks() || is_done(); });
      sleeping_.fetch_sub(1);
      spins = 0;
    }
  }
}

void Pool::run(Job& job) {
  std::lock_guard<std::mutex> run_lock(run_mutex_);
  job_ = &job;
  phase_ = -1;
  alone_ = workers_.empty() || getpid() != process_;
  active_.store(true);
  advance(0);
  work(0, [this] { return !active_.load(); });
}

Pool& shared_pool(int threads) {
  if (threads < 1) throw std::invalid_argument("a pool has one thread at least");
  static std::mutex mutex;
  static auto* pools = new std::map<int, std::unique_ptr<Pool>>();  // never destroyed: threads may outlive main
  std::lock_guard<std::mutex> lock(mutex);
  auto& pool = (*pools)[threads];
  if (!pool) pool = std::make_unique<Pool>(threads);
  return *pool;
}

}  // namespace specinfer
