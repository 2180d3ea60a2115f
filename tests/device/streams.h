// Streams of the simulated device. Each has a thread of its own that works off a queue, with random delays.
//
// A kernel runs at once, in the thread that called it, after what its stream still had to do; but what it wrote appears in
// the device's memory only when the stream comes to it. A host, or a stream, that does not wait reads NaN or old numbers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include <time.h>

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 9;  // per device: the default one and eight that are handed out in turn

using Micro = std::chrono::microseconds;

// Time in nanoseconds. With a fixed time per kernel (`set_kernel_time`) it is simulated: the host's is the processor time
// of this process without what it spends on computing kernels, and waiting for the device only moves it on. So what is
// measured does not depend on what else the machine does.
struct Time {
  std::atomic<int> kernel_us{0};  // what each kernel takes; 0: as long as it takes
  std::atomic<int64_t> in_kernels{0}, waited{0};

  static int64_t clock(clockid_t which) {
    timespec t;
    clock_gettime(which, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
  }
  static int64_t processor() { return clock(CLOCK_PROCESS_CPUTIME_ID); }
  int64_t now() const { return kernel_us == 0 ? clock(CLOCK_MONOTONIC) : processor() - in_kernels + waited; }
  void wait_until(int64_t time) {
    if (kernel_us != 0) waited += std::max<int64_t>(0, time - now());
  }
};
inline Time& the_time() {
  static Time* time = new Time;
  return *time;
}

struct Delays {
  std::mutex mutex;
  std::mt19937_64 random{0};
  std::atomic<double> probability{0};
  std::atomic<int> longest_us{0};

  bool late() {
    if (probability <= 0) return false;
    std::lock_guard<std::mutex> lock(mutex);
    return std::uniform_real_distribution<>(0, 1)(random) < probability;
  }
  void sleep() {
    int us = 0;
    if (longest_us > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      us = std::uniform_int_distribution<>(0, longest_us)(random);
    }
    std::this_thread::sleep_for(Micro(us));
  }
};
inline Delays& delays() {
  static Delays* all = new Delays;
  return *all;
}

struct Counters {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> reads{0};   // the host waited for a number from the device
  std::atomic<int64_t> waits{0};   // the host waited for a stream, an event or a device
  std::atomic<int64_t> copies_out{0}, copies_in{0};  // between host and device, waiting or not
};
inline Counters& counters() {
  static Counters* all = new Counters;
  return *all;
}

class Event {
 public:
  void mark(int64_t time) {
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = time;
    marked_ = true;
    changed_.notify_all();
  }
  bool happened() {
    std::lock_guard<std::mutex> lock(mutex_);
    return marked_ && the_time().now() >= time_;
  }
  int64_t wait_marked() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return marked_; });
    return time_;
  }
  void synchronize() { the_time().wait_until(wait_marked()); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool marked_ = false;
  int64_t time_ = 0;
};

class Stream {
 public:
  explicit Stream(int64_t id) : id_(id) {}
  int64_t id() const { return id_; }

  // Later, after everything before it; the caller goes on.
  void later(std::function<void()> task, bool delayed = true) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    queue_.push_back({std::move(task), delayed});
    changed_.notify_all();
  }

  // Now if the stream has nothing to do, else later: always in the stream's order.
  void in_order(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty() && !busy_) return task();
    }
    later(std::move(task), false);
  }

  // What the stream was given is in memory; not yet a wait of the host for the simulated time.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_ && the_time().now() >= free_at_.load();
  }
  void synchronize() {
    drain();
    the_time().wait_until(free_at_);
  }

  // Time is told in another way from here on.
  void forget_time() {
    drain();
    free_at_ = 0;
  }

  // A kernel was put on the stream: with a fixed time per kernel, it is busy so much longer.
  void spend() {
    int us = the_time().kernel_us;
    if (us == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    free_at_ = std::max(free_at_.load(), the_time().now()) + us * 1000LL;
  }

  std::shared_ptr<Event> record() {
    auto event = std::make_shared<Event>();
    in_order([this, event] { event->mark(std::max(free_at_.load(), the_time().now())); });
    return event;
  }
  void wait_for(std::shared_ptr<Event> event) {
    if (event->happened()) return;
    later([this, event] { free_at_ = std::max(free_at_.load(), event->wait_marked()); }, false);
  }

  std::recursive_mutex running;  // kernels of one stream run one after the other, whoever calls them

 private:
  struct Task {
    std::function<void()> run;
    bool delayed;
  };
  void work() {
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        task = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
      }
      if (task.delayed) delays().sleep();
      task.run();
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      if (queue_.empty()) idle_.notify_all();
    }
  }

  int64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Task> queue_;
  bool started_ = false, busy_ = false;
  std::atomic<int64_t> free_at_{0};
};

inline Stream& stream_of(int device, int64_t id) {
  static auto* all = [] {
    auto* streams = new std::vector<std::unique_ptr<Stream>>;
    for (int i = 0; i < kDevices * kStreams; ++i) streams->push_back(std::make_unique<Stream>(i % kStreams));
    return streams;
  }();
  return *(*all)[device * kStreams + id];
}

inline int& current_device() {
  static thread_local int device = 0;
  return device;
}
inline int64_t& current_stream_id(int device) {
  static thread_local int64_t ids[kDevices] = {};
  return ids[device];
}
inline Stream& current_stream(int device) { return stream_of(device, current_stream_id(device)); }

}  // namespace sim
