// A small thread pool: started on first use, grown on demand, rebuilt in a forked child, which has no threads.

#include "core.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

namespace laconic {
namespace {

struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // workers that have not finished; guarded by Pool::mutex_

  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(context, i);
  }
};

class Pool {
 public:
  void run(Job& job, int threads) {
    // One job at a time: a second caller works alone instead of waiting for the workers.
    if (!turn_.try_lock()) return job.work();
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) {
        workers_.emplace_back([this, id = workers_.size()] { loop(id); });
      }
      job.helpers = threads - 1;
      wanted_ = threads - 1;
      job_ = &job;
      ++round_;
    }
    wake_.notify_all();
    job.work();
    {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return job.helpers == 0; });
      job_ = nullptr;
    }
    turn_.unlock();
  }

 private:
  void loop(size_t id) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen && job_ != nullptr; });
      seen = round_;
      if (static_cast<int>(id) >= wanted_) continue;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->helpers == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int wanted_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: workers may outlive static destruction, and a forked child must not join its parent's threads.
Pool& pool() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  if (owner != getpid()) {
    pool = new Pool;
    owner = getpid();
  }
  return *pool;
}

}  // namespace

void parallel(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context) {
  if (tasks < threads) threads = static_cast<int>(tasks);
  Job job{task, context, tasks};
  if (threads <= 1) return job.work();
  pool().run(job, threads);
}

}  // namespace laconic
