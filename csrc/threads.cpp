#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <pthread.h>

namespace longfill {
namespace {

// Calls follow each other within microseconds in a step: a worker looks for the next one this long before it sleeps.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

std::atomic<std::uint64_t> done{0};

using Work = std::function<void(std::int64_t, int)>;

class Pool {
 public:
  void run(int num_threads, std::int64_t tasks, const Work& work) {
    std::lock_guard<std::mutex> turn(turn_);
    grow(num_threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      tasks_ = tasks;
      error_ = nullptr;
      next_.store(0, std::memory_order_relaxed);
      helpers_ = num_threads - 1;
      call_.store(call_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }
    wake_.notify_all();
    take_tasks(0);
    {
      // A worker that was not awake by now is not waited for.
      std::lock_guard<std::mutex> lock(mutex_);
      helpers_ = 0;
    }
    for (int i = 0; inside_.load(std::memory_order_acquire) != 0; ++i) i < kSpins ? relax() : std::this_thread::yield();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void grow(int wanted) {
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        const int number = static_cast<int>(workers_.size()) + 1;
        const std::uint64_t seen = call_.load(std::memory_order_relaxed);
        workers_.emplace_back([this, number, seen] { serve(number, seen); });
        workers_.back().detach();
      }
    } catch (const std::system_error&) {
      // The threads that the system grants must suffice: tasks are handed out one at a time.
    }
  }

  void serve(int number, std::uint64_t seen) {
    for (;;) {
      for (int i = 0; i < kSpins && call_.load(std::memory_order_acquire) == seen; ++i) relax();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return call_.load(std::memory_order_relaxed) != seen; });
        seen = call_.load(std::memory_order_relaxed);
        if (number > helpers_) continue;
        inside_.fetch_add(1, std::memory_order_relaxed);
      }
      take_tasks(number);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  void take_tasks(int thread) {
    try {
      for (std::int64_t task = next_++; task < tasks_; task = next_++) {
        (*work_)(task, thread);
        done.fetch_add(1, std::memory_order_relaxed);
      }
    } catch (...) {
      next_.store(tasks_);
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  std::mutex turn_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> call_{0};
  int helpers_ = 0;  // workers that the call in progress may have; 0 between calls
  const Work* work_ = nullptr;
  std::int64_t tasks_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> inside_{0};
  std::exception_ptr error_;
};

Pool* pool = nullptr;
std::mutex making;

// A forked child has no worker: it makes its own pool. The parent's is left behind, locks and all.
void forget_pool() {
  pool = nullptr;
  new (&making) std::mutex;
}

Pool& the_pool() {
  std::lock_guard<std::mutex> lock(making);
  if (pool == nullptr) {
    static std::once_flag registered;
    std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    pool = new Pool;  // never destroyed: its threads outlive main
  }
  return *pool;
}

}  // namespace

void for_tasks(int num_threads, std::int64_t tasks, const Work& work) {
  if (num_threads > tasks) num_threads = static_cast<int>(tasks);
  if (num_threads > 1) return the_pool().run(num_threads, tasks, work);
  for (std::int64_t task = 0; task < tasks; ++task) {
    work(task, 0);
    done.fetch_add(1, std::memory_order_relaxed);
  }
}

std::uint64_t tasks_done() { return done.load(std::memory_order_relaxed); }

}  // namespace longfill
