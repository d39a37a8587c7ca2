// A pool of threads that runs jobs of many short phases. Each worker begins with its own share of a phase's chunks, so
// that it reads on where it was and what it fetches ahead is its own; then it claims what others have left: a thread
// that the system has taken away holds up nobody but the chunk it was in. Results must not depend on who runs a chunk.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace specinfer {

struct Job {
  virtual ~Job() = default;
  virtual int chunks(int phase) = 0;  // below 65536; negative after the last phase
  virtual void run(int phase, int chunk, int worker) = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Of n chunks, the first that is of a worker's share.
  static int64_t share(int64_t n, int worker, int threads) { return n * worker / threads; }

  // Keeps worker i on processors[i], if there are so many. The caller, worker 0, is not the pool's to move: the
  // first processor is left to it. Throws std::invalid_argument where the system does not do it.
  void pin(const std::vector<int>& processors);

  // Runs all phases, one after the other; the caller is worker 0. One job at a time: others wait.
  void run(Job& job);

 private:
  // The chunks of a worker's share: serial of the phase << 32 | where they end << 16 | the next one to claim
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
  };

  bool try_chunk(int worker);
  bool claim(Share& share, int& chunk);
  bool has_chunks() const;
  void advance(int worker);
  void wake();
  template <class Condition>
  void work(int worker, Condition is_done);

  const int threads_;
  const std::unique_ptr<Share[]> shares_;  // [threads]
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<bool> active_{false};
  Job* job_ = nullptr;  // written before the tickets that open a phase, stable until the phase is done
  int phase_ = 0;
  uint32_t total_ = 0;
  uint64_t serial_ = 0;

  long process_;        // threads do not survive a fork: a child works alone
  bool alone_ = false;

  std::mutex run_mutex_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

// The process's pool of this size, made on first use and kept.
Pool& shared_pool(int threads);

}  // namespace specinfer
