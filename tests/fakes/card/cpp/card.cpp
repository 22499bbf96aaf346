// A card made of host memory, for a CPU build of PyTorch: device type CUDA is real (allocator, guard,
// streams, events, pinned memory, autograd threads), its kernels are those of the CPU. Every operation
// checks devices as CUDA's wrappers do, and a race detector (vector clocks) checks streams.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <functional>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int64_t kHost = -1;
std::recursive_mutex& lock_ = *new std::recursive_mutex;
using Guard = std::lock_guard<std::recursive_mutex>;

// ---------------------------------------------------------------- settings and counters
struct Card {
  int64_t capacity = int64_t(80) << 30, limit = int64_t(1) << 60;
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0;
  int64_t fail_at = -1;  // the allocation, counted from now, that fails; -1: none
  int64_t least = 0;     // bytes below which an allocation never fails by fail_at
  int64_t allocations = 0;
  int64_t syncs = 0;     // times the host waited for the card
  int devices = 1;
  bool refuse_sync = false, expandable = false;
} card;
std::vector<std::string>& races = *new std::vector<std::string>;
std::set<std::string>& kernels = *new std::set<std::string>;
bool poison = true;
std::set<std::string>& scalar_ok = *new std::set<std::string>;  // operations without CUDA's check of devices (TensorIterator)

// ---------------------------------------------------------------- vector clocks
using Clock = std::map<int64_t, int64_t>;
std::map<int64_t, Clock>& clocks = *new std::map<int64_t, Clock>;  // of each stream
Clock& host_clock = *new Clock;
thread_local int64_t current_stream = 0;
thread_local DeviceIndex current_device = 0;
int64_t next_stream = 1;

void join(Clock& into, const Clock& from) {
  for (auto& [s, n] : from) into[s] = std::max(into[s], n);
}
bool covers(const Clock& clock, int64_t stream, int64_t n) {
  auto it = clock.find(stream);
  return it != clock.end() && it->second >= n;
}

struct Event {
  Clock clock;
  bool recorded = false;
};

// ---------------------------------------------------------------- pending copies to the host
struct Pending {
  int64_t stream, number;
  char* to;
  std::vector<char> bytes;       // contiguous destination
  c10::Storage keep;             // of the destination
};
std::vector<Pending>& pending = *new std::vector<Pending>;

struct Upload {  // a copy from pinned memory that the card has not begun
  int64_t stream, number;
  Tensor to, from;  // CPU aliases
  void* to_storage;
  const char *begin, *end;  // the source's bytes
};
std::vector<Upload>& uploads = *new std::vector<Upload>;

void finish(Pending& p) { std::memcpy(p.to, p.bytes.data(), p.bytes.size()); }

void flush_pending(const Clock& done) {
  std::vector<Pending> left;
  for (auto& p : pending) {
    if (covers(done, p.stream, p.number)) finish(p); else left.push_back(std::move(p));
  }
  pending.swap(left);
}

void finish_overlapping(const char* begin, const char* end) {
  std::vector<Pending> left;
  for (auto& p : pending) {
    if (p.to < end && begin < p.to + p.bytes.size()) finish(p); else left.push_back(std::move(p));
  }
  pending.swap(left);
}

void run_upload(Upload& u) {
  finish_overlapping(u.begin, u.end);
  c10::impl::ExcludeDispatchKeyGuard no(c10::autograd_dispatch_keyset);
  u.to.copy_(u.from);
}

void flush_uploads(const std::function<bool(const Upload&)>& which) {
  std::vector<Upload> all;
  all.swap(uploads);
  for (auto& u : all) {
    if (which(u)) run_upload(u); else uploads.push_back(std::move(u));
  }
}

void host_waits_for(const Clock& clock) {
  card.syncs++;
  TORCH_CHECK(!card.refuse_sync, "called a synchronizing CUDA operation");
  join(host_clock, clock);
  flush_uploads([&](const Upload& u) { return covers(host_clock, u.stream, u.number); });
  flush_pending(host_clock);
}

void host_waits_for_all() {
  Clock all;
  for (auto& [s, c] : clocks) join(all, c);
  host_waits_for(all);
}

// ---------------------------------------------------------------- who reads and writes what
struct Access {
  int64_t writer = kHost, written = 0;
  std::string by;
  std::map<int64_t, std::pair<int64_t, std::string>> reads;
};
struct Block {
  size_t size, room;
  int64_t stream;      // on which it was allocated
  bool shared = false; // mapped, or of another process
  bool expandable = false;
  std::string counter;  // of another process's memory: the file of its count of readers
  int fd = -1;
  DeviceIndex device = 0;
  std::map<int64_t, Access> pages;  // by offset / granule of the storage
  std::set<int64_t> recorded;       // record_stream
};
std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>;

void complain(const std::string& what) {
  races.push_back(what);
  if (const char* path = getenv("FAKECARD_RACES")) {
    std::ofstream out(path, std::ios::app);
    out << what << "\n";
  }
}

// Accesses are tracked per view (offset, length) of a block, merged by overlap.
struct Range { int64_t begin, end; };
std::unordered_map<void*, std::vector<std::pair<Range, Access>>>& accesses = *new std::unordered_map<void*, std::vector<std::pair<Range, Access>>>;

void touch(const Tensor& t, bool writes, const std::string& op) {
  if (!t.defined() || t.numel() == 0 || !t.device().is_cuda()) return;
  void* base = t.storage().mutable_data();
  if (!base || !blocks.count(base)) return;
  int64_t begin = t.storage_offset() * t.element_size(), last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  Range r{begin, begin + (last + 1) * int64_t(t.element_size())};
  int64_t s = current_stream;
  Clock& mine = clocks[s];
  auto& list = accesses[base];
  bool merged = false;
  for (auto& [range, a] : list) {
    if (range.begin >= r.end || r.begin >= range.end) continue;
    if (a.writer != kHost && a.writer != s && !covers(mine, a.writer, a.written))
      complain(op + " on stream " + std::to_string(s) + (writes ? " writes" : " reads") +
               " memory written by " + a.by + " on stream " + std::to_string(a.writer) +
               " without waiting for it");
    if (writes)
      for (auto& [rs, n] : a.reads)
        if (rs != s && !covers(mine, rs, n.first))
          complain(op + " on stream " + std::to_string(s) + " writes memory read by " + n.second +
                   " on stream " + std::to_string(rs) + " without waiting for it");
    if (range.begin == r.begin && range.end == r.end) {
      merged = true;
      if (writes) { a = Access{}; a.writer = s; a.written = mine[s]; a.by = op; }
      else a.reads[s] = {mine[s], op};
    }
  }
  if (!merged) {
    if (writes) {  // what lies inside is overwritten
      list.erase(std::remove_if(list.begin(), list.end(), [&](auto& e) {
        return e.first.begin >= r.begin && e.first.end <= r.end; }), list.end());
    }
    Access a;
    if (writes) { a.writer = s; a.written = mine[s]; a.by = op; } else a.reads[s] = {mine[s], op};
    list.push_back({r, a});
  }
}

int64_t enqueue() {  // what the host has waited for is done before what it begins now
  join(clocks[current_stream], host_clock);
  return ++clocks[current_stream][current_stream];
}

// ---------------------------------------------------------------- allocator
std::string human(double b) {
  std::ostringstream o; o.precision(2); o << std::fixed;
  if (b < 1 << 20) o << b / 1024 << " KiB"; else if (b < 1 << 30) o << b / (1 << 20) << " MiB";
  else o << b / (1 << 30) << " GiB";
  return o.str();
}

void free_block(void* p) {
  Guard g(lock_);
  auto it = blocks.find(p);
  if (it == blocks.end()) return;
  Block& b = it->second;
  // A later allocation on the block's stream may get this memory at once.
  for (auto& [range, a] : accesses[p]) {
    auto check = [&](int64_t s, int64_t n, const std::string& by) {
      if (s == kHost || s == b.stream || b.recorded.count(s)) return;
      for (int64_t r : b.recorded)  // the allocator waits for what these have been given by now
        if (covers(clocks[r], s, n)) return;
      if (!covers(clocks[b.stream], s, n) && !covers(host_clock, s, n))
        complain("memory of stream " + std::to_string(b.stream) + " is freed while " + by +
                 " uses it on stream " + std::to_string(s) + " (no wait, no record_stream)");
    };
    check(a.writer, a.written, a.by);
    for (auto& [s, n] : a.reads) check(s, n.first, n.second);
  }
  flush_uploads([&](const Upload& u) { return u.to_storage == p; });
  accesses.erase(p);
  card.allocated -= b.room;
  if (poison && !b.shared) std::memset(p, 0xCD, std::min<size_t>(b.size, 1 << 16));
  munmap(p, b.room);
  if (!b.counter.empty()) { std::ofstream out(b.counter); out << 0; }  // as the received storage's deleter
  if (b.fd >= 0) ::close(b.fd);
  blocks.erase(it);
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Guard g(lock_);
    Device device(DeviceType::CUDA, current_device);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    size_t room = (size + 511) / 512 * 512;
    card.allocations++;
    bool fails = card.allocated + int64_t(room) > std::min(card.capacity, card.limit);
    if (card.fail_at >= 0 && int64_t(size) >= card.least && card.fail_at-- == 0) fails = true;
    if (fails) {
      std::ostringstream o;
      o << "CUDA out of memory. Tried to allocate " << human(size) << ". GPU " << int(current_device)
        << " has a total capacity of " << human(card.capacity) << " of which "
        << human(card.capacity - card.allocated) << " is free. Including non-PyTorch memory, this "
        << "process has " << human(card.allocated) << " memory in use.";
      TORCH_CHECK_WITH(OutOfMemoryError, false, o.str());
    }
    size_t mapped = (room + 4095) / 4096 * 4096;
    Block b{size, mapped, current_stream};
    b.device = current_device;
    b.expandable = card.expandable;
    void* p;
    if (size >= (1 << 16)) {
      b.fd = memfd_create("fakecard", 0);
      TORCH_CHECK(b.fd >= 0 && ftruncate(b.fd, mapped) == 0, "memfd");
      p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, b.fd, 0);
    } else {
      p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    TORCH_CHECK(p != MAP_FAILED, "mmap");
    if (poison) std::memset(p, 0xCB, std::min<size_t>(mapped, 1 << 20));
    blocks[p] = b;
    card.allocated += mapped;
    card.peak_allocated = std::max(card.peak_allocated, card.allocated);
    card.reserved = std::max(card.reserved, card.allocated);
    card.peak_reserved = std::max(card.peak_reserved, card.reserved);
    return {p, p, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} allocator;

// ---------------------------------------------------------------- pinned memory
std::map<char*, size_t>& pinned = *new std::map<char*, size_t>;  // begin -> size
int64_t pinned_bytes = 0, pinned_allocations = 0;
bool is_pinned(const void* p) {
  Guard g(lock_);
  auto it = pinned.upper_bound((char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)p < it->first + it->second;
}
void free_pinned(void* p) {
  Guard g(lock_);
  auto it = pinned.find((char*)p);
  if (it == pinned.end()) return;
  // The caching host allocator keeps a block until copies that PyTorch made are done.
  flush_uploads([&](const Upload& u) { return u.begin < it->first + it->second && it->first < u.end; });
  finish_overlapping(it->first, it->first + it->second);
  pinned_bytes -= it->second;
  pinned.erase(it);
  std::memset(p, 0xCD, 1);
  ::free(p);
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Guard g(lock_);
    size_t room = 1;
    while (room < size) room <<= 1;  // as CachingHostAllocator
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, std::max<size_t>(room, 64)) == 0, "no memory");
    if (poison) std::memset(p, 0xCA, std::min<size_t>(room, 1 << 20));
    pinned[(char*)p] = std::max<size_t>(room, 1);
    pinned_bytes += room;
    pinned_allocations++;
    return {p, p, &free_pinned, DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

// ---------------------------------------------------------------- guard
struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device d) const override {
    if (d.index() < 0) return;
    TORCH_CHECK(d.index() < card.devices, "CUDA error: invalid device ordinal");
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  Stream of(int64_t id, Device d) const {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, d.index() < 0 ? current_device : d.index()), id);
  }
  Stream getStream(Device d) const override { return of(current_stream, d); }
  Stream getDefaultStream(Device d) const override { return of(0, d); }
  Stream getNewStream(Device d, int) const override { Guard g(lock_); return of(next_stream++, d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)s.id(); }
  DeviceIndex deviceCount() const noexcept override { return card.devices; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Guard g(lock_);
    if (!*e) *e = new Event;
    auto* event = (Event*)*e;
    event->clock = clocks[s.id()];
    event->recorded = true;
  }
  void block(void* e, const Stream& s) const override {
    Guard g(lock_);
    if (e) join(clocks[s.id()], ((Event*)e)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { Guard g(lock_); host_waits_for(clocks[s.id()]); }
  void synchronizeEvent(void* e) const override { Guard g(lock_); if (e) host_waits_for(((Event*)e)->clock); }
  void synchronizeDevice(const DeviceIndex) const override { Guard g(lock_); host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    Guard g(lock_);
    auto it = blocks.find(p.get());
    if (it != blocks.end()) it->second.recorded.insert(s.id());
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---------------------------------------------------------------- generator and hooks
struct CardGenerator final : at::CPUGeneratorImpl {
  CardGenerator() : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = Device(DeviceType::CUDA, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};
at::Generator& default_generator() {
  static at::Generator g = at::make_generator<CardGenerator>();
  return g;
}
at::Generator to_cpu(const at::Generator& g) {
  // A CPU generator with the same state, to be written back.
  auto cpu = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  cpu.set_state(g.get_state());
  return cpu;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<CardGenerator>(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex deviceCount() const override { return card.devices; }
  void setCurrentDevice(DeviceIndex d) const override { ::current_device = d; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = ::current_device;
    ::current_device = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  int getNumGPUs() const override { return card.devices; }
  void deviceSynchronize(DeviceIndex) const override { Guard g(lock_); host_waits_for_all(); }
};

// ---------------------------------------------------------------- views of card memory for CPU kernels
Tensor as_cpu(const Tensor& t) {
  auto* keep = new c10::Storage(t.storage());
  c10::DataPtr data(
      t.storage().mutable_data(), keep, [](void* p) { delete (c10::Storage*)p; }, Device(DeviceType::CPU));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  Tensor alias(std::move(impl));
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

void* base_of(const Tensor& t) { return t.storage().mutable_data(); }

void flush_uploads_to(const Tensor& t) {
  void* base = base_of(t);
  flush_uploads([&](const Upload& u) { return u.to_storage == base; });
}

Tensor empty_card(at::IntArrayRef sizes, at::ScalarType dtype, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype, format);
}
Tensor empty_card_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

struct OnDevice {
  DeviceIndex old = current_device;
  explicit OnDevice(Device d) { if (d.is_cuda() && d.index() >= 0) current_device = d.index(); }
  ~OnDevice() { current_device = old; }
};

Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<Device> device,
                           std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device.value_or(Device(DeviceType::CUDA, current_device)));
  return empty_card(sizes, dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())), format);
}
Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device.value_or(Device(DeviceType::CUDA, current_device)));
  return empty_card_strided(
      sizes, strides, dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
}

// ---------------------------------------------------------------- copies
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  TORCH_CHECK(!src.is_meta() && !self.is_meta(), "Cannot copy out of meta tensor; no data!");
  at::AutoDispatchBelowADInplaceOrView below;
  Guard g(lock_);
  OnDevice on(self.is_cuda() ? self.device() : src.device());
  int64_t number = enqueue(), stream = current_stream;
  if (self.is_cuda() && src.is_cuda()) {
    flush_uploads_to(self);
    flush_uploads_to(src);
    touch(src, false, "copy_");
    touch(self, true, "copy_");
    Tensor to = as_cpu(self);
    to.copy_(as_cpu(src));
    return self;
  }
  bool plain = self.scalar_type() == src.scalar_type() && self.is_contiguous() && src.is_contiguous() &&
      self.sizes() == src.sizes() && self.numel() > 0;
  if (self.is_cuda()) {
    flush_uploads_to(self);
    touch(self, true, "copy_ from host");
    const char* begin = (const char*)src.const_data_ptr();
    if (non_blocking && plain && is_pinned(begin)) {
      uploads.push_back({stream, number, as_cpu(self), src, base_of(self), begin, begin + src.nbytes()});
      return self;
    }
    if (!non_blocking && src.numel()) host_waits_for(clocks[stream]);
    as_cpu(self).copy_(src);
    return self;
  }
  flush_uploads_to(src);
  touch(src, false, "copy_ to host");
  char* to = (char*)self.mutable_data_ptr();
  char* end = to + self.nbytes();
  if (self.is_contiguous()) {
    for (auto& u : uploads)
      if (u.begin < end && to < u.end && !covers(clocks[stream], u.stream, u.number))
        complain("a copy to the host on stream " + std::to_string(stream) + " overwrites memory that stream " +
                 std::to_string(u.stream) + " has still to read");
    flush_uploads([&](const Upload& u) { return u.begin < end && to < u.end; });
  }
  if (non_blocking && plain && is_pinned(to)) {
    Pending p{stream, number, to, std::vector<char>(self.nbytes()), self.storage()};
    std::memcpy(p.bytes.data(), as_cpu(src).const_data_ptr(), p.bytes.size());
    std::memset(to, 0xEE, p.bytes.size());
    pending.push_back(std::move(p));
    return self;
  }
  if (src.numel()) host_waits_for(clocks[stream]);
  self.copy_(as_cpu(src));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor to = dst;
  copy_(to, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  Tensor to = dst;
  copy_(to, self, false);
  return dst;
}

at::Scalar local_scalar(const Tensor& self) {
  Guard g(lock_);
  flush_uploads_to(self);
  enqueue();
  touch(self, false, "item");
  host_waits_for(clocks[current_stream]);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(as_cpu(self));
}

Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                           at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, source, offset, sizes, strides);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  self.set_(storage, 0, {0}, {});
  return self;
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  OnDevice on(self.device());
  return at::native::resize_(self, sizes, format);
}

// ---------------------------------------------------------------- every other operation
const std::set<std::string> kMayMix = {  // CUDA takes other tensors of the CPU here, too
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor",
    "aten::index_put", "aten::set_", "aten::record_stream", "aten::_fused_adamw_", "aten::_fused_adam_",
    "aten::_foreach_copy_"};
const std::set<std::string> kWaits = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::is_set_to"};

std::string name_of(const c10::OperatorHandle& op) {
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  const size_t count = parameters.size(), first = stack->size() - count;
  const std::string name = name_of(op);
  Guard g(lock_);
  enqueue();
  kernels.insert(name);

  std::optional<Device> device;
  std::vector<c10::IValue> originals(stack->begin() + first, stack->end());
  auto look = [&](const Tensor& t) { if (t.defined() && t.is_cuda() && !device) device = t.device(); };
  for (auto& v : originals) {
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t);
    else if (v.isList()) { for (const c10::IValue& e : v.toListRef()) if (e.isTensor()) look(e.toTensor()); }
    else if (v.isDevice() && v.toDevice().is_cuda() && !device) device = v.toDevice();
  }
  Device here = device.value_or(Device(DeviceType::CUDA, current_device));
  OnDevice on(here);

  std::vector<std::pair<Tensor, Tensor>> grown;  // empty outputs that the kernel may resize
  auto convert = [&](const Tensor& t, bool writes, const std::string& parameter) -> Tensor {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      bool scalar = t.dim() == 0 && !writes && (scalar_ok.empty() || scalar_ok.count(name) ||
          t.unsafeGetTensorImpl()->is_wrapped_number());
      TORCH_CHECK(
          t.is_meta() || scalar || kMayMix.count(name),
          "Expected all tensors to be on the same device, but got ", parameter, " is on ", t.device(),
          ", different from other tensors on ", here, " (when checking argument in ", name, ")");
      return t;
    }
    TORCH_CHECK(t.device() == here, "Expected all tensors to be on the same device, but got ", parameter,
                " on ", t.device(), " and ", here, " in ", name);
    flush_uploads_to(t);
    touch(t, writes, name);
    if (writes && t.numel() == 0) {
      Tensor fresh = at::empty(t.sizes(), t.options().device(at::kCPU));
      grown.emplace_back(t, fresh);
      return fresh;
    }
    return as_cpu(t);
  };
  for (size_t i = 0; i < count; i++) {
    c10::IValue& v = (*stack)[first + i];
    const auto& p = parameters[i];
    bool writes = p.alias_info() && p.alias_info()->isWrite();
    if (v.isTensor()) {
      v = convert(v.toTensor(), writes, p.name());
    } else if (v.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : v.toTensorVector()) all.push_back(convert(t, writes, p.name()));
      v = all;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> all;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        all.push_back(t.has_value() ? std::optional<Tensor>(convert(*t, writes, p.name())) : std::nullopt);
      v = all;
    } else if (v.isDevice() && v.toDevice().is_cuda()) {
      v = Device(DeviceType::CPU);
    } else if (v.isGenerator() && v.toGenerator().defined() && v.toGenerator().device().is_cuda()) {
      v = to_cpu(v.toGenerator());
    } else if (v.isNone() && p.type()->str() == "Generator?" && name != "aten::randperm") {
      originals[i] = default_generator();
      v = to_cpu(default_generator());
    }
  }
  if (kWaits.count(name)) host_waits_for(clocks[current_stream]);
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (size_t i = 0; i < count; i++) {  // generators go on
    if (originals[i].isGenerator() && originals[i].toGenerator().defined() &&
        originals[i].toGenerator().device().is_cuda()) {
      auto generator = originals[i].toGenerator();
      generator.set_state(given[i].toGenerator().get_state());
    }
  }
  for (auto& [t, fresh] : grown) {
    if (fresh.numel() == 0 && fresh.sizes() == t.sizes()) continue;
    t.resize_(fresh.sizes());
    as_cpu(t).copy_(fresh);
    touch(t, true, name);
  }

  const auto& results = schema.returns();
  const size_t start = stack->size() - results.size();
  auto back = [&](const Tensor& r) -> Tensor {
    if (!r.defined() || !r.device().is_cpu() || !device) return r;
    void* data = base_of(r);
    if (data)
      for (auto& v : originals) {  // a view of an input
        auto shares = [&](const Tensor& t) { return t.defined() && t.is_cuda() && base_of(t) == data; };
        std::vector<Tensor> inputs;
        if (v.isTensor()) inputs.push_back(v.toTensor());
        else if (v.isTensorList()) inputs = v.toTensorVector();
        for (auto& t : inputs)
          if (shares(t)) {
            auto impl = c10::make_intrusive<c10::TensorImpl>(
                c10::Storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), r.dtype());
            impl->set_sizes_and_strides(r.sizes(), r.strides(), r.storage_offset());
            return Tensor(std::move(impl));
          }
      }
    Tensor made = empty_card_strided(r.sizes(), r.strides(), r.scalar_type());
    if (r.numel()) as_cpu(made).copy_(r);
    if (r.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    touch(made, true, name);
    return made;
  };
  for (size_t i = 0; i < results.size(); i++) {
    c10::IValue& v = (*stack)[start + i];
    const auto* alias = results[i].alias_info();
    if (v.isTensor()) {
      bool found = false;
      if (alias && alias->isWrite())
        for (size_t j = 0; j < count && !found; j++) {
          const auto* of = parameters[j].alias_info();
          if (of && *of == *alias && originals[j].isTensor()) { v = originals[j]; found = true; }
        }
      if (!found) v = back(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> all;
      for (const Tensor& t : v.toTensorVector()) all.push_back(back(t));
      v = all;
    }
  }
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0;  // plain products
}

struct Setup {
  Setup() {
    c10::SetAllocator(DeviceType::CUDA, &allocator);
    at::setHostAllocator(DeviceType::CUDA, &pinned_allocator);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  }
} setup;

C10_REGISTER_GUARD_IMPL(CUDA, CardGuard)

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

bool pinned_on(const Tensor& self, std::optional<Device>) { return is_pinned(self.const_data_ptr()); }
void record_stream_(Tensor& self, Stream s) {
  Guard g(lock_);
  auto it = blocks.find(base_of(self));
  if (it != blocks.end()) it->second.recorded.insert(s.id());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& t, at::IntArrayRef s) { return at::native::view(t, s); });
  m.impl("_reshape_alias", [](const Tensor& t, at::IntArrayRef s, at::IntArrayRef st) {
    return at::native::_reshape_alias(t, s, st); });
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream_);
}

Tensor alias_on_cpu(const Tensor& t) { Guard g(lock_); flush_uploads_to(t); return as_cpu(t); }
void touched(const Tensor& t, bool writes, std::string name) {
  Guard g(lock_);
  enqueue();
  flush_uploads_to(t);
  touch(t, writes, name);
}
Tensor to_card(const Tensor& t, std::string name) {  // the output of a kernel, without a wait
  Guard g(lock_);
  Tensor made = empty_card(t.sizes(), t.scalar_type(), std::nullopt);
  at::AutoDispatchBelowADInplaceOrView below;
  if (t.numel()) as_cpu(made).copy_(t);
  enqueue();
  touch(made, true, name);
  return made;
}
void resize_storage(const Tensor& t, int64_t bytes) {  // of a tensor that spans its storage
  Guard g(lock_);
  OnDevice on(t.device());
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (bytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, nullptr, &free_block, t.device()));
    storage->set_nbytes(0);
    return;
  }
  auto data = allocator.allocate(bytes);
  size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) {
    flush_uploads_to(t);
    std::memcpy(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
std::vector<int64_t> share(const Tensor& t) {  // [descriptor, mapped bytes, storage bytes]
  Guard g(lock_);
  auto it = blocks.find(base_of(t));
  TORCH_CHECK(it != blocks.end() && it->second.fd >= 0, "only memory of 64 KiB or more can be shared");
  TORCH_CHECK(!it->second.expandable, "fakecard: memory of a growing segment has no CUDA IPC handle");
  return {it->second.fd, int64_t(it->second.room), int64_t(t.storage().nbytes())};
}
Tensor open_shared(std::string path, int64_t room, int64_t bytes, std::string counter) {
  Guard g(lock_);
  int fd = ::open(path.c_str(), O_RDWR);
  TORCH_CHECK(fd >= 0, "CUDA error: invalid resource handle (", path, ")");
  void* p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(p != MAP_FAILED, "mmap of shared memory");
  Block b{size_t(bytes), size_t(room), current_stream};
  b.shared = true;
  b.counter = counter;
  b.fd = fd;
  blocks[p] = b;
  card.allocated += room;  // freed by free_block
  c10::DataPtr data(p, p, &free_block, Device(DeviceType::CUDA, current_device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<uint8_t>());
  impl->set_sizes_contiguous({bytes});
  return Tensor(std::move(impl));
}

TORCH_LIBRARY(fakecard, m) {
  m.def("alias(Tensor t) -> Tensor", &alias_on_cpu);
  m.def("touch(Tensor t, bool writes, str name) -> ()", &touched);
  m.def("to_card(Tensor t, str name) -> Tensor", &to_card);
  m.def("resize_storage(Tensor t, int bytes) -> ()", &resize_storage);
  m.def("share(Tensor t) -> int[]", &share);
  m.def("open_shared(str path, int room, int bytes, str counter) -> Tensor", &open_shared);
  m.def("set_generator(Generator? g) -> ()", [](std::optional<at::Generator> g) { default_generator() = *g; });
}
}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

// ---------------------------------------------------------------- for Python, by ctypes
extern "C" {
int64_t fc_stat(const char* name) {
  Guard g(lock_);
  const std::map<std::string, int64_t> all = {
      {"allocated", card.allocated}, {"peak_allocated", card.peak_allocated},
      {"reserved", card.reserved}, {"peak_reserved", card.peak_reserved},
      {"capacity", card.capacity}, {"allocations", card.allocations},
      {"syncs", card.syncs}, {"pinned", pinned_bytes},
      {"pinned_allocations", pinned_allocations}, {"devices", card.devices}};
  return all.at(name);
}
void fc_reset_peak() { Guard g(lock_); card.peak_allocated = card.allocated; card.peak_reserved = card.reserved; }
void fc_empty_cache() { Guard g(lock_); card.reserved = card.allocated; }
void fc_capacity(int64_t bytes) { Guard g(lock_); card.capacity = bytes; }
void fc_expandable(int on) { Guard g(lock_); card.expandable = on; }
void fc_limit(int64_t bytes) { Guard g(lock_); card.limit = bytes; }
void fc_devices(int n) { card.devices = n; }
void fc_fail_at(int64_t n, int64_t least) { Guard g(lock_); card.fail_at = n; card.least = least; }
void fc_refuse_sync(int on) { Guard g(lock_); card.refuse_sync = on; }
void fc_poison(int on) { poison = on; }
int fc_get_device() { return current_device; }
void fc_set_device(int d) { current_device = d; }
int64_t fc_get_stream() { return current_stream; }
void fc_set_stream(int64_t s) { current_stream = s; }
int64_t fc_new_stream() { Guard g(lock_); return next_stream++; }
void fc_sync_stream(int64_t s) { Guard g(lock_); host_waits_for(clocks[s]); }
void fc_sync_device() { Guard g(lock_); host_waits_for_all(); }
void* fc_event() { return new Event; }
void fc_event_free(void* e) { delete (Event*)e; }
void fc_event_record(void* e, int64_t s) {
  Guard g(lock_);
  ((Event*)e)->clock = clocks[s];
  ((Event*)e)->recorded = true;
}
void fc_event_block(void* e, int64_t s) { Guard g(lock_); join(clocks[s], ((Event*)e)->clock); }
void fc_event_sync(void* e) { Guard g(lock_); host_waits_for(((Event*)e)->clock); }
void fc_wait_stream(int64_t waits, int64_t on) { Guard g(lock_); join(clocks[waits], clocks[on]); }
void fc_pin(void* p, size_t n) { Guard g(lock_); pinned[(char*)p] = n; }
void fc_unpin(void* p) { Guard g(lock_); pinned.erase((char*)p); }
void fc_scalar_ok(const char* names) {
  Guard g(lock_);
  std::istringstream in(names);
  std::string name;
  while (in >> name) scalar_ok.insert(name);
}
static std::string text;
const char* fc_races() {
  Guard g(lock_);
  text.clear();
  for (auto& r : races) text += r + "\n";
  races.clear();
  return text.c_str();
}
const char* fc_segments() {
  Guard g(lock_);
  text.clear();
  for (auto& [p, b] : blocks)
    text += std::to_string(int64_t(p)) + " " + std::to_string(b.room) + " " + (b.expandable ? "1" : "0") + "\n";
  return text.c_str();
}
const char* fc_kernels() {
  Guard g(lock_);
  text.clear();
  for (auto& k : kernels) text += k + "\n";
  return text.c_str();
}
}
