// A card made of host memory, for the CPU build of PyTorch: the device type CUDA has an allocator,
// a guard, streams, events, pinned memory and a generator, and its kernels are the CPU's. Written
// against the headers of torch 2.13. fakecard/__init__.py says what it shows and what it cannot.
#include "operations.hpp"

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>

namespace card {

// SDPA by plain products, which the fallback runs.
static int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&,
                                const std::optional<Tensor>&, double, bool, std::optional<double>,
                                bool) {
  return 0;
}

static const bool is_registered = [] {
  c10::SetAllocator(DeviceType::CUDA, &allocator);
  at::setHostAllocator(DeviceType::CUDA, &pinned_allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();

C10_REGISTER_GUARD_IMPL(CUDA, CardGuard)

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view",
               [](const Tensor& t, at::IntArrayRef sizes) { return at::native::view(t, sizes); });
  library.impl("_reshape_alias",
               [](const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
                 return at::native::_reshape_alias(t, sizes, strides);
               });
  library.impl("resize_", &resize_);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &to_number);
  library.impl("set_.source_Storage",
               [](Tensor& t, at::Storage s) -> Tensor& { return at::native::set_(t, s); });
  library.impl("set_.source_Storage_storage_offset",
               [](Tensor& t, at::Storage s, int64_t offset, at::IntArrayRef sizes,
                  at::IntArrayRef strides) -> Tensor& {
                 return at::native::set_storage_cpu_(t, s, offset, sizes, strides);
               });
  library.impl("set_.source_Tensor",
               [](Tensor& t, const Tensor& s) -> Tensor& { return at::native::set_tensor_(t, s); });
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY(fakecard, library) {
  library.def("alias(Tensor t) -> Tensor", &alias);
  library.def("touch(Tensor t, bool writes, str name) -> ()", &use);
  library.def("to_card(Tensor t, str name) -> Tensor", &to_card);
  library.def("resize_storage(Tensor t, int bytes) -> ()", &resize_storage);
  library.def("share(Tensor t) -> int[]", &share);
  library.def("open_shared(str path, int room, int bytes, str readers) -> Tensor", &open_shared);
  library.def("set_generator(Generator? g) -> ()",
              [](std::optional<at::Generator> generator) { default_generator() = *generator; });
}

template <class Rows, class Write>
static const char* lines(const Rows& rows, Write write) {
  static std::string text;
  std::ostringstream out;
  for (const auto& row : rows) write(out, row) << "\n";
  text = out.str();
  return text.c_str();
}

}  // namespace card

namespace at {
using card::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// What Python calls through ctypes.
using namespace card;
extern "C" {
int64_t fc_stat(const char* name) {
  Locked locked(the_lock);
  const std::map<std::string, int64_t> all = {{"allocated", state.allocated},
                                              {"peak_allocated", state.peak_allocated},
                                              {"reserved", state.reserved},
                                              {"peak_reserved", state.peak_reserved},
                                              {"capacity", state.capacity},
                                              {"allocations", state.allocations},
                                              {"syncs", state.syncs},
                                              {"pinned", state.pinned},
                                              {"pinned_allocations", state.pinned_allocations},
                                              {"devices", state.devices}};
  return all.at(name);
}
void fc_capacity(int64_t bytes) {
  Locked locked(the_lock);
  state.capacity = bytes;
}
void fc_limit(int64_t bytes) {
  Locked locked(the_lock);
  state.limit = bytes;
}
void fc_expandable(int on) {
  Locked locked(the_lock);
  state.expandable = on;
}
void fc_devices(int number) {
  Locked locked(the_lock);
  state.devices = number;
}
void fc_refuse_sync(int on) {
  Locked locked(the_lock);
  state.refuse_sync = on;
}
void fc_fail_at(int64_t allocation, int64_t least) {
  Locked locked(the_lock);
  state.fail_at = allocation;
  state.fail_least = least;
}
void fc_reset_peak() {
  Locked locked(the_lock);
  state.peak_allocated = state.allocated;
  state.peak_reserved = state.reserved;
}
void fc_empty_cache() {
  Locked locked(the_lock);
  state.reserved = state.allocated;
}
int fc_get_device() { return card::current_device; }
void fc_set_device(int device) { card::current_device = device; }
int64_t fc_get_stream() { return card::current_stream; }
void fc_set_stream(int64_t stream) { card::current_stream = stream; }
int64_t fc_new_stream() {
  Locked locked(the_lock);
  return next_stream++;
}
void fc_wait_stream(int64_t waiting, int64_t other) {
  Locked locked(the_lock);
  join(clocks[waiting], clocks[other]);
}
void fc_sync_stream(int64_t stream) {
  Locked locked(the_lock);
  wait_for(clocks[stream]);
}
void fc_sync_device() {
  Locked locked(the_lock);
  wait_for_all();
}
void fc_pin(void* begin, size_t size) {
  Locked locked(the_lock);
  pinned[(char*)begin] = size;
}
void fc_unpin(void* begin) {
  Locked locked(the_lock);
  pinned.erase((char*)begin);
}
void fc_takes_scalars(const char* names) {
  Locked locked(the_lock);
  std::istringstream words(names);
  for (std::string name; words >> name;) takes_scalars.insert(name);
}
const char* fc_races() {
  Locked locked(the_lock);
  const std::vector<std::string> taken = std::exchange(races, {});
  return lines(taken, [](auto& out, const auto& race) -> auto& { return out << race; });
}
const char* fc_segments() {
  Locked locked(the_lock);
  return lines(blocks, [](auto& out, const auto& block) -> auto& {
    return out << int64_t(block.first) << " " << block.second.room << " "
               << block.second.expandable;
  });
}
}
