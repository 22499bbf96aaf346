// Tensors of the card: how they are made, copied, and seen by the CPU's kernels.
#pragma once

#include "device.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>

#include <fcntl.h>

namespace card {

constexpr int kNotThere = 0xEE;  // in host memory that a copy has not reached

inline Tensor tensor_of(c10::Storage storage, c10::DispatchKey key, caffe2::TypeMeta dtype,
                        at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto made =
      c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  made->set_sizes_and_strides(sizes, strides, offset);
  return Tensor(std::move(made));
}

// Lets a tensor take part in type promotion as another does: as a Python number, or not.
inline void copy_wrapping(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number())
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// Returns the host's view of a tensor of the card, which keeps the memory.
inline Tensor as_cpu(const Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  auto drop = [](void* storage) { delete (c10::Storage*)storage; };
  c10::DataPtr data(base_of(tensor), kept, drop, DeviceType::CPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       nullptr, false);
  Tensor view = tensor_of(std::move(storage), c10::DispatchKey::CPU, tensor.dtype(), tensor.sizes(),
                          tensor.strides(), tensor.storage_offset());
  copy_wrapping(tensor, view);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

inline void finish_uploads_to(const Tensor& tensor) {
  finish_uploads([base = base_of(tensor)](const Upload& u) { return u.block == base; });
}

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::CUDA);

inline Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kKeys, dtype);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<Device>;
using Format = std::optional<at::MemoryFormat>;

inline at::ScalarType or_default(Dtype dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

inline void refuse_pinning(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

inline Tensor empty(at::IntArrayRef sizes, Dtype dtype, Layout, Where device,
                    std::optional<bool> pin, Format format) {
  refuse_pinning(pin);
  OnDevice on(device.value_or(Device(DeviceType::CUDA, current_device)));
  return at::detail::empty_generic(sizes, &allocator, kKeys, or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype, Layout,
                            Where device, std::optional<bool> pin) {
  refuse_pinning(pin);
  OnDevice on(device.value_or(Device(DeviceType::CUDA, current_device)));
  return make(sizes, strides, or_default(dtype));
}

// ---------------------------------------------------------------------------- copies
inline void copy_on_card(const Tensor& target, const Tensor& source) {
  finish_uploads_to(target);
  finish_uploads_to(source);
  touch(source, false, "copy_");
  touch(target, true, "copy_");
  as_cpu(target).copy_(as_cpu(source));
}

inline void copy_from_host(const Tensor& target, const Tensor& source, Number number,
                           bool may_be_late) {
  finish_uploads_to(target);
  touch(target, true, "copy_ from host");
  const char* begin = (const char*)source.const_data_ptr();
  if (may_be_late && is_pinned(begin)) {
    const char* end = begin + source.nbytes();
    uploads.push_back(
        {current_stream, number, as_cpu(target), source, base_of(target), begin, end});
    return;
  }
  as_cpu(target).copy_(source);
}

inline void copy_to_host(const Tensor& target, const Tensor& source, Number number,
                         bool may_be_late) {
  finish_uploads_to(source);
  touch(source, false, "copy_ to host");
  char* begin = (char*)target.mutable_data_ptr();
  const char* end = begin + target.nbytes();
  if (target.is_contiguous()) {
    for (const Upload& u : uploads)
      if (u.overlaps(begin, end) && !covers(clocks[current_stream], u.stream, u.number))
        report_race("a copy to the host" + on_stream(current_stream) +
                    " overwrites memory that stream " + std::to_string(u.stream) +
                    " has still to read");
    finish_uploads([&](const Upload& u) { return u.overlaps(begin, end); });
  }
  if (may_be_late && is_pinned(begin)) {
    const char* bytes = (const char*)as_cpu(source).const_data_ptr();
    downloads.push_back(
        {current_stream, number, begin, {bytes, bytes + target.nbytes()}, target.storage()});
    std::memset(begin, kNotThere, target.nbytes());
    return;
  }
  if (source.numel()) wait_for(clocks[current_stream]);
  Tensor(target).copy_(as_cpu(source));
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  TORCH_CHECK(!source.is_meta() && !self.is_meta(), "Cannot copy out of meta tensor; no data!");
  at::AutoDispatchBelowADInplaceOrView below;
  Locked locked(the_lock);
  OnDevice on(self.is_cuda() ? self.device() : source.device());
  const Number number = begin_operation();
  const bool is_plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() &&
                        source.is_contiguous() && self.sizes() == source.sizes() &&
                        self.numel() > 0;
  if (self.is_cuda() && source.is_cuda()) {
    copy_on_card(self, source);
  } else if (self.is_cuda()) {
    if (!non_blocking && source.numel()) wait_for(clocks[current_stream]);
    copy_from_host(self, source, number, non_blocking && is_plain);
  } else {
    copy_to_host(self, source, number, non_blocking && is_plain);
  }
  return self;
}

inline Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, self, non_blocking);
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

inline at::Scalar to_number(const Tensor& self) {
  Locked locked(the_lock);
  finish_uploads_to(self);
  begin_operation();
  touch(self, false, "item");
  wait_for(clocks[current_stream]);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(as_cpu(self));
}

// ---------------------------------------------------------------------------- storages
inline const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, Format format) {
  OnDevice on(self.device());
  return at::native::resize_(self, sizes, format);
}

inline Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return self.set_(storage, 0, {0}, {});
}

inline void record_stream(Tensor& self, Stream stream) {
  Locked locked(the_lock);
  if (Block* block = block_of(base_of(self))) block->recorded.insert(stream.id());
}

// Gives the storage of a tensor that spans it another size.
inline void resize_storage(const Tensor& tensor, int64_t size) {
  Locked locked(the_lock);
  OnDevice on(tensor.device());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data = allocator.allocate(size);
  if (const size_t kept = std::min<size_t>(size, storage->nbytes())) {
    finish_uploads_to(tensor);
    std::memcpy(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}

// Returns by what another process maps a tensor's block: its file, its room, the storage's bytes.
inline std::vector<int64_t> share(const Tensor& tensor) {
  Locked locked(the_lock);
  const Block* block = block_of(base_of(tensor));
  TORCH_CHECK(block && block->file >= 0,
              "the card of host memory shares blocks of 64 KiB and more");
  TORCH_CHECK(!block->expandable, "memory of a growing segment has no CUDA IPC handle");
  return {block->file, int64_t(block->room), int64_t(tensor.storage().nbytes())};
}

inline Tensor open_shared(std::string path, int64_t room, int64_t size, std::string readers) {
  Locked locked(the_lock);
  const int file = ::open(path.c_str(), O_RDWR);
  TORCH_CHECK(file >= 0, "CUDA error: invalid resource handle (", path, ")");
  void* base = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(base != MAP_FAILED, "CUDA error: cannot map the memory of another process");
  add_block(base, {size_t(room), current_stream, false, file, std::move(readers)});
  c10::DataPtr data(base, base, &free_block, Device(DeviceType::CUDA, current_device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data), nullptr, false);
  const auto dtype = caffe2::TypeMeta::Make<uint8_t>();
  return tensor_of(std::move(storage), c10::DispatchKey::CUDA, dtype, {size}, {1}, 0);
}

// ---------------------------------------------------------------------------- for kernels in
// Python
inline Tensor alias(const Tensor& tensor) {
  Locked locked(the_lock);
  finish_uploads_to(tensor);
  return as_cpu(tensor);
}

inline void use(const Tensor& tensor, bool writes, std::string operation) {
  Locked locked(the_lock);
  begin_operation();
  finish_uploads_to(tensor);
  touch(tensor, writes, operation);
}

// Returns what a kernel has made, without a wait.
inline Tensor to_card(const Tensor& tensor, std::string operation) {
  Locked locked(the_lock);
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor made = make(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  as_cpu(made).copy_(tensor);
  begin_operation();
  touch(made, true, operation);
  return made;
}

}  // namespace card
