// Memory of the simulated device, and a caching allocator after the rules of torch's for CUDA
// (c10/cuda/CUDACachingAllocator.cpp, torch 2.13): rounding, two pools, segments, splitting, merging, events, cap.
#pragma once

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams.h"

namespace sim {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kDeviceBytes = size_t(64) << 30;  // of addresses; pages that are not touched take nothing

// The device's memory is mapped twice. Tensors carry addresses of a mapping that nobody may touch (PROT_NONE), so a host
// that reads or writes through `data_ptr()` dies at once. Kernels go through the other one, at a fixed distance.
class AddressSpace {
 public:
  AddressSpace() {
    int file = memfd_create("simulated-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0, "the simulated device has no memory");
    file_ = file;
    closed_ = map(PROT_NONE);
    open_ = map(PROT_READ | PROT_WRITE);
  }
  char* base() const { return closed_; }
  bool contains(const void* p) const {
    return p >= closed_ && p < closed_ + kDeviceBytes;
  }
  void* for_kernels(const void* p) const { return open_ + (static_cast<const char*>(p) - closed_); }
  void give_back(const void* p, size_t size) const {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<const char*>(p) - closed_, size);
  }

 private:
  char* map(int protection) const {
    void* p = mmap(nullptr, kDeviceBytes, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(p != MAP_FAILED, "the simulated device's memory could not be mapped");
    return static_cast<char*>(p);
  }
  int file_;
  char *closed_, *open_;
};

struct Settings {
  size_t total_bytes = size_t(4) << 30;  // what the device says it has
  size_t cap_bytes = SIZE_MAX;           // torch.cuda's set_per_process_memory_fraction
  bool expandable = false;               // PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  bool poison = true;                    // new memory is full of NaN
  int64_t fail_at = -1;                  // the so-maniest allocation from now is refused
  int64_t fail_times = 0;                // and so many after it
};

struct Pool;

struct Block {
  char* ptr = nullptr;
  size_t size = 0;
  size_t requested = 0;
  int64_t stream = 0;
  Pool* pool = nullptr;
  Block *prev = nullptr, *next = nullptr;
  bool allocated = false;
  bool mapped = true;       // expandable segments: whether there is memory behind these addresses
  bool expandable = false;
  char* segment = nullptr;  // expandable segments: where its pages begin
  std::set<int64_t> used_on;             // by `record_stream`
  std::vector<std::shared_ptr<Event>> waiting_for;  // freed, but these have not happened yet
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->ptr < b->ptr;
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->ptr < b->ptr;
  }
};

struct Pool {
  explicit Pool(bool small) : small(small) {}
  bool small;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;  // of expandable segments
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;

inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// One device's allocator. All members are called with the lock held, but for the public ones, which take it.
class DeviceMemory {
 public:
  explicit DeviceMemory(int index) : index_(index), small_(true), large_(false) {
    ranges_[0] = kDeviceBytes;
  }
  AddressSpace space;
  Settings settings;

  Block* allocate(size_t requested) {
    std::lock_guard<std::mutex> lock(mutex_);
    finish_waiting(false);
    int64_t stream = current_stream(index_).id();
    size_t size = std::max<size_t>(512, up(requested, 512));
    Pool& pool = size <= kMiB ? small_ : large_;
    Block* block = refuse() ? nullptr : find_or_get(pool, size, stream);
    if (!block) out_of_memory(requested);
    block = take(block, size, requested);
    blocks_[block->ptr] = block;
    note(block->ptr, requested);
    if (settings.poison) current_stream(index_).in_order([this, p = block->ptr, requested] {
      std::memset(space.for_kernels(p), 0xFF, requested);
    });
    return block;
  }

  void release(void* ptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = blocks_.at(ptr);
    blocks_.erase(ptr);
    block->allocated = false;
    decrease(stats_.allocation, block, 1);
    decrease(stats_.allocated_bytes, block, block->size);
    decrease(stats_.requested_bytes, block, block->requested);
    if (block->used_on.empty()) return free_block(block);
    for (int64_t id : block->used_on) block->waiting_for.push_back(stream_of(index_, id).record());
    block->used_on.clear();
    waiting_.push_back(block);
  }

  void used_on(void* ptr, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(ptr);
    if (found != blocks_.end() && found->second->stream != stream) found->second->used_on.insert(stream);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cached();
  }

  // What is reserved, as torch.cuda.memory_snapshot tells it: runs of neighbours that have memory. Addresses from 0 on.
  struct SegmentState {
    size_t address = 0, size = 0;
    bool small = false, expandable = false;
    int64_t stream = 0;
    std::vector<std::pair<size_t, bool>> blocks;  // size, and whether it is in use
  };
  std::vector<SegmentState> snapshot() {
    std::lock_guard<std::mutex> lock(mutex_);
    finish_waiting(false);
    std::set<Block*> starts;
    auto begin = [&](Block* b) {
      while (b->prev && b->prev->mapped) b = b->prev;
      starts.insert(b);
    };
    for (auto& [ptr, block] : blocks_) begin(block);
    for (Pool* pool : {&small_, &large_}) for (Block* block : pool->free) begin(block);
    for (Block* block : waiting_) begin(block);
    std::vector<SegmentState> all;
    for (Block* b : starts) {
      SegmentState s;
      s.address = b->ptr - space.base();
      s.small = b->pool->small;
      s.expandable = b->expandable;
      s.stream = b->stream;
      for (; b && b->mapped; b = b->next) {
        s.size += b->size;
        s.blocks.push_back({b->size, !is_free(b)});
      }
      all.push_back(s);
    }
    return all;
  }

  Stats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_peaks() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (StatArray* array : arrays()) for (auto& stat : *array) stat.peak = stat.current;
  }
  void reset_accumulated() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (StatArray* array : arrays()) for (auto& stat : *array) stat.allocated = stat.freed = 0;
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }
  int64_t allocations() const { return count_; }

  // From now on what is asked for and free again: address, and bytes (-1: free). Gives what there was till now.
  using Requests = std::vector<std::pair<size_t, int64_t>>;
  Requests write_down(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    writes_down_ = on;
    return std::exchange(requests_, {});
  }
  size_t reserved() const { return reserved_; }

 private:
  std::vector<StatArray*> arrays() {
    return {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split, &stats_.allocated_bytes,
            &stats_.reserved_bytes, &stats_.active_bytes, &stats_.inactive_split_bytes, &stats_.requested_bytes};
  }
  // Statistics are kept for all blocks (0), the small pool (1) and the large one (2).
  static void increase(StatArray& stat, const Block* b, size_t n) {
    stat[0].increase(n);
    stat[b->pool->small ? 1 : 2].increase(n);
  }
  static void decrease(StatArray& stat, const Block* b, size_t n) {
    stat[0].decrease(n);
    stat[b->pool->small ? 1 : 2].decrease(n);
  }

  void note(const void* ptr, int64_t bytes) {
    if (writes_down_) requests_.push_back({static_cast<const char*>(ptr) - space.base(), bytes});
  }

  bool refuse() {
    ++count_;
    if (settings.fail_at < 0 || settings.fail_at-- > 0) return false;
    settings.fail_at = --settings.fail_times > 0 ? 0 : -1;
    return true;
  }

  Block* find_or_get(Pool& pool, size_t size, int64_t stream) {
    Block* block = find_free(pool, size, stream);
    if (!block) block = new_memory(pool, size, stream);
    if (!block) {
      ++stats_.num_alloc_retries;
      release_cached();
      block = new_memory(pool, size, stream);
    }
    return block;
  }

  Block* find_free(Pool& pool, size_t size, int64_t stream) {
    Block key;
    key.stream = stream;
    key.size = size;
    auto it = pool.free.lower_bound(&key);
    if (it == pool.free.end() || (*it)->stream != stream) return nullptr;
    // At the end of what is mapped, a block counts with what it can grow to: rather take one that cannot grow.
    auto grown = [](Block* b) { return b->size + (b->next && !b->next->mapped ? b->next->size : 0); };
    if ((*it)->expandable)
      for (auto next = std::next(it); next != pool.free.end() && (*next)->stream == stream && grown(*next) < grown(*it);)
        it = next++;
    Block* block = *it;
    pool.free.erase(it);
    return block;
  }

  Block* new_memory(Pool& pool, size_t size, int64_t stream) {
    return settings.expandable ? expand(pool, size, stream) : new_segment(pool, size, stream);
  }

  bool within_cap(size_t more) const { return reserved_ + more <= std::min(settings.cap_bytes, settings.total_bytes); }

  Block* new_segment(Pool& pool, size_t size, int64_t stream) {
    size_t bytes = size <= kMiB ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : up(size, 2 * kMiB);
    char* ptr = within_cap(bytes) ? take_addresses(bytes) : nullptr;
    if (!ptr) return nullptr;
    Block* block = new Block;
    block->ptr = ptr;
    block->size = bytes;
    block->stream = stream;
    block->pool = &pool;
    reserve(block, bytes);
    increase(stats_.segment, block, 1);
    return block;
  }

  void reserve(Block* block, size_t bytes) {
    reserved_ += bytes;
    increase(stats_.reserved_bytes, block, bytes);
  }

  Block* take(Block* block, size_t size, size_t requested) {
    size_t rest = block->size - size;
    bool split = block->pool->small || block->expandable ? rest >= 512 : rest > kMiB;
    if (split) {
      Block* tail = new Block(*block);
      tail->ptr += size;
      tail->size = rest;
      tail->prev = block;
      if (tail->next) tail->next->prev = tail;
      block->next = tail;
      block->size = size;
      tail->pool->free.insert(tail);
    }
    block->allocated = true;
    block->requested = requested;
    increase(stats_.allocation, block, 1);
    increase(stats_.active, block, 1);
    increase(stats_.allocated_bytes, block, block->size);
    increase(stats_.active_bytes, block, block->size);
    increase(stats_.requested_bytes, block, block->requested);
    return block;
  }

  void free_block(Block* block) {
    note(block->ptr, -1);
    decrease(stats_.active, block, 1);
    decrease(stats_.active_bytes, block, block->size);
    merge(block, block->prev);
    merge(block, block->next);
    block->pool->free.insert(block);
  }

  static bool is_free(const Block* b) {
    return b && !b->allocated && b->waiting_for.empty() && b->used_on.empty();
  }

  // `other`, a neighbour, becomes part of `block` if it is free, too, and has memory, or has none, as this one.
  static void merge(Block* block, Block* other) {
    if (!is_free(other) || other->mapped != block->mapped) return;
    (other->mapped ? (void)other->pool->free.erase(other) : (void)other->pool->unmapped.erase(other));
    if (other == block->prev) {
      block->ptr = other->ptr;
      block->prev = other->prev;
      if (block->prev) block->prev->next = block;
    } else {
      block->next = other->next;
      if (block->next) block->next->prev = block;
    }
    block->size += other->size;
    delete other;
  }

  // What was freed while another stream used it becomes free once that stream has come so far.
  void finish_waiting(bool wait) {
    std::vector<Block*> still;
    for (Block* block : waiting_) {
      bool done = true;
      for (auto& event : block->waiting_for) {
        if (wait) event->synchronize();
        done = done && event->happened();
      }
      if (!done) {
        still.push_back(block);
        continue;
      }
      block->waiting_for.clear();
      free_block(block);
    }
    waiting_ = std::move(still);
  }

  void release_cached() {
    finish_waiting(true);
    for (Pool* pool : {&large_, &small_}) {
      std::vector<Block*> all(pool->free.begin(), pool->free.end());
      for (Block* block : all) {
        if (block->expandable) unmap(block);
        else if (!block->prev && !block->next) give_back(block);
      }
    }
  }

  void give_back(Block* block) {
    block->pool->free.erase(block);
    decrease(stats_.reserved_bytes, block, block->size);
    decrease(stats_.segment, block, 1);
    reserved_ -= block->size;
    space.give_back(block->ptr, block->size);
    return_addresses(block->ptr, block->size);
    delete block;
  }

  // ---- expandable segments: one range of addresses for each pool and stream, with memory behind the part in use ----

  size_t page(const Pool& pool) const { return pool.small ? 2 * kMiB : 20 * kMiB; }

  Block* expand(Pool& pool, size_t size, int64_t stream) {
    Block* block = find_expandable(pool, size, stream);
    if (!block) return nullptr;
    if (!block->mapped && !(block = map(block, std::min(block->size, size)))) return nullptr;
    while (block->size < size)  // free, then addresses without memory: map some, which joins what is before
      if (!(block = map(block->next, std::min(size - block->size, block->next->size)))) return nullptr;
    pool.free.erase(block);
    return block;
  }

  Block* find_expandable(Pool& pool, size_t size, int64_t stream) {
    Block key;
    key.stream = stream;
    for (auto it = pool.unmapped.lower_bound(&key); it != pool.unmapped.end() && (*it)->stream == stream; ++it) {
      Block* block = is_free((*it)->prev) ? (*it)->prev : *it;
      size_t room = 0;
      for (Block* b = block; room < size && is_free(b); b = b->next) room += b->size;
      if (room >= size) return block;
    }
    size_t range = kDeviceBytes / 16;
    char* ptr = take_addresses(range);
    if (!ptr) return nullptr;
    Block* block = new Block;
    block->ptr = ptr;
    block->size = range;
    block->stream = stream;
    block->pool = &pool;
    block->mapped = false;
    block->expandable = true;
    block->segment = ptr;
    increase(stats_.segment, block, 1);
    pool.unmapped.insert(block);
    return block;
  }

  // Put memory behind the first bytes of an unmapped block, in whole pages; gives it joined with free neighbours.
  Block* map(Block* block, size_t size) {
    size_t bytes = std::min(up(size, page(*block->pool)), block->size);
    if (!within_cap(bytes)) return nullptr;
    Pool* pool = block->pool;
    pool->unmapped.erase(block);
    if (bytes < block->size) {
      Block* rest = new Block(*block);
      rest->ptr += bytes;
      rest->size -= bytes;
      rest->prev = block;
      if (rest->next) rest->next->prev = rest;
      block->next = rest;
      block->size = bytes;
      pool->unmapped.insert(rest);
    }
    block->mapped = true;
    reserve(block, bytes);
    merge(block, block->prev);
    merge(block, block->next);
    pool->free.insert(block);
    return block;
  }

  // Take the memory away behind the whole pages of a free block.
  void unmap(Block* block) {
    size_t bytes = page(*block->pool);
    char* from = block->segment + up(block->ptr - block->segment, bytes);
    char* to = block->segment + (block->ptr + block->size - block->segment) / bytes * bytes;
    if (to <= from) return;
    Pool* pool = block->pool;
    pool->free.erase(block);
    auto part = [&](char* begin, char* end) {
      Block* b = new Block(*block);
      b->ptr = begin;
      b->size = end - begin;
      return b;
    };
    Block* before = from > block->ptr ? part(block->ptr, from) : nullptr;
    Block* after = to < block->ptr + block->size ? part(to, block->ptr + block->size) : nullptr;
    block->ptr = from;
    block->size = to - from;
    block->mapped = false;
    if (before) {
      before->next = block;
      if (before->prev) before->prev->next = before;
      block->prev = before;
      pool->free.insert(before);
    }
    if (after) {
      after->prev = block;
      if (after->next) after->next->prev = after;
      block->next = after;
      pool->free.insert(after);
    }
    decrease(stats_.reserved_bytes, block, block->size);
    reserved_ -= block->size;
    space.give_back(block->ptr, block->size);
    merge(block, block->prev);
    merge(block, block->next);
    pool->unmapped.insert(block);
  }

  // ---- addresses: first fit ----

  char* take_addresses(size_t bytes) {
    for (auto& [start, size] : ranges_) {
      if (size < bytes) continue;
      size_t at = start, rest = size - bytes;
      ranges_.erase(at);
      if (rest) ranges_[at + bytes] = rest;
      return space.base() + at;
    }
    return nullptr;
  }
  void return_addresses(const char* ptr, size_t bytes) {
    size_t at = ptr - space.base();
    auto next = ranges_.lower_bound(at);
    if (next != ranges_.end() && next->first == at + bytes) {
      bytes += next->second;
      next = ranges_.erase(next);
    }
    if (next != ranges_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    ranges_[at] = bytes;
  }

  [[noreturn]] void out_of_memory(size_t requested) {
    ++stats_.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "simulated device out of memory. Tried to allocate ", requested, " bytes; reserved ",
        reserved_, " of ", std::min(settings.cap_bytes, settings.total_bytes), " bytes on device ", index_, ".");
  }

  int index_;
  std::mutex mutex_;
  Pool small_, large_;
  std::unordered_map<void*, Block*> blocks_;
  std::vector<Block*> waiting_;
  std::map<size_t, size_t> ranges_;  // free addresses: start and length
  size_t reserved_ = 0;
  int64_t count_ = 0;
  bool writes_down_ = false;
  Requests requests_;
  Stats stats_;
};

}  // namespace sim
