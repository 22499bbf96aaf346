// The card's allocator, and pinned memory. A block of the card is memory of its own, and goes back
// at once: there is no cache. New memory, and freed memory that others map, has bytes of its own.
#pragma once

#include "transfers.hpp"

#include <ATen/core/CachingHostAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <iomanip>
#include <sstream>
#include <unordered_map>

namespace card {

constexpr int kNew = 0xCB, kFreed = 0xCD, kNewPinned = 0xCA;
constexpr size_t kFilled = 1 << 20;  // only the beginning is filled, for speed
constexpr size_t kPage = 4096;
constexpr size_t kSharable = 1 << 16;  // smaller blocks have no file of their own

struct Block {
  size_t room;
  StreamId stream;  // on which it was allocated
  bool expandable = false;
  int file = -1;             // the memory's, by which another process can map it
  std::string readers = {};  // of another process's memory: the file that counts its readers
  std::vector<Use> uses = {};
  std::set<StreamId> recorded = {};  // by record_stream
};
inline std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>;

inline void* base_of(const Tensor& tensor) { return tensor.storage().mutable_data(); }

inline Block* block_of(void* base) {
  auto found = blocks.find(base);
  return found == blocks.end() ? nullptr : &found->second;
}

inline void touch(const Tensor& tensor, bool writes, const std::string& operation) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_cuda()) return;
  Block* block = block_of(base_of(tensor));
  if (!block) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  const int64_t width = tensor.element_size(), begin = tensor.storage_offset() * width;
  add_use(block->uses, begin, begin + (last + 1) * width, writes, operation);
}

// A later allocation on the block's stream may get the memory at once, so its users must precede
// it, unless record_stream names them.
inline void check_users(const Block& block) {
  auto check = [&](StreamId stream, Number number, const std::string& operation) {
    bool is_over = stream == block.stream || block.recorded.count(stream) ||
                   covers(clocks[block.stream], stream, number) ||
                   covers(host_clock, stream, number);
    for (StreamId recorded : block.recorded)
      is_over = is_over || covers(clocks[recorded], stream, number);
    if (!is_over)
      report_race("memory of stream " + std::to_string(block.stream) + " is freed while " +
                  operation + " uses it" + on_stream(stream) + " (no wait, no record_stream)");
  };
  for (const Use& use : block.uses) {
    if (use.writer != Use::kNobody) check(use.writer, use.written, use.by);
    for (const auto& [reader, read] : use.readers) check(reader, read.first, read.second);
  }
}

inline void free_block(void* base) {
  Locked locked(the_lock);
  Block* block = block_of(base);
  if (!block) return;
  check_users(*block);
  finish_uploads([&](const Upload& u) { return u.block == base; });
  state.allocated -= block->room;
  if (!block->readers.empty())
    std::ofstream(block->readers) << 0;  // as the deleter of torch's received storage
  else if (block->file >= 0)  // another process may have mapped it
    std::memset(base, kFreed, std::min(block->room, kFilled));
  munmap(base, block->room);
  if (block->file >= 0) ::close(block->file);
  blocks.erase(base);
}

inline void add_block(void* base, Block block) {
  state.allocated += block.room;
  state.peak_allocated = std::max(state.peak_allocated, state.allocated);
  state.reserved = std::max(state.reserved, state.allocated);
  state.peak_reserved = std::max(state.peak_reserved, state.reserved);
  blocks[base] = std::move(block);
}

inline std::string in_mib(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << double(bytes) / (1 << 20) << " MiB";
  return text.str();
}

inline bool must_fail(size_t size, size_t room) {
  if (state.allocated + int64_t(room) > std::min(state.capacity, state.limit)) return true;
  return state.fail_at >= 0 && int64_t(size) >= state.fail_least && state.fail_at-- == 0;
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Locked locked(the_lock);
    const Device device(DeviceType::CUDA, current_device);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    const size_t room = (size + kPage - 1) / kPage * kPage;
    state.allocations++;
    TORCH_CHECK_WITH(OutOfMemoryError, !must_fail(size, room),
                     "CUDA out of memory. Tried to allocate ", in_mib(size), ". GPU ",
                     int(current_device), " has a total capacity of ", in_mib(state.capacity),
                     " of which ", in_mib(state.capacity - state.allocated),
                     " is free. Including non-PyTorch memory, this process has ",
                     in_mib(state.allocated), " memory in use.");
    Block block{room, current_stream, state.expandable};
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (size >= kSharable) {
      flags = MAP_SHARED;
      block.file = memfd_create("fakecard", 0);
      TORCH_CHECK(block.file >= 0 && ftruncate(block.file, room) == 0, "no file for a block");
    }
    void* base = mmap(nullptr, room, PROT_READ | PROT_WRITE, flags, block.file, 0);
    TORCH_CHECK(base != MAP_FAILED, "no memory for a block");
    std::memset(base, kNew, std::min(room, kFilled));
    add_block(base, std::move(block));
    return {base, base, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
inline CardAllocator allocator;

// ---------------------------------------------------------------------------- pinned memory
inline std::map<char*, size_t>& pinned = *new std::map<char*, size_t>;  // sizes by the first byte

inline bool is_pinned(const void* address) {
  Locked locked(the_lock);
  auto after = pinned.upper_bound((char*)address);
  if (after == pinned.begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return (char*)address < begin + size;
}

inline void free_pinned(void* base) {
  Locked locked(the_lock);
  auto found = pinned.find((char*)base);
  if (found == pinned.end()) return;
  // CachingHostAllocator keeps a block until the copies that torch made are done.
  const char *begin = found->first, *end = begin + found->second;
  finish_uploads([&](const Upload& u) { return u.overlaps(begin, end); });
  finish_downloads([&](const Download& d) { return d.overlaps(begin, end); });
  state.pinned -= found->second;
  pinned.erase(found);
  ::free(base);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Locked locked(the_lock);
    size_t room = 64;
    while (room < size) room <<= 1;  // as CachingHostAllocator
    void* base = nullptr;
    TORCH_CHECK(posix_memalign(&base, 64, room) == 0, "no pinned memory");
    std::memset(base, kNewPinned, std::min(room, kFilled));
    pinned[(char*)base] = room;
    state.pinned += room;
    state.pinned_allocations++;
    return {base, base, &free_pinned, DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

}  // namespace card
