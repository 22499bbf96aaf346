// What torch asks of a device type: its devices, streams and events, its generator, and its hooks.
#pragma once

#include "memory.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace card {

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < state.devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return state.devices; }

  Stream stream(StreamId number, Device device) const {
    const DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), number);
  }
  Stream getStream(Device device) const override { return stream(current_stream, device); }
  Stream getDefaultStream(Device device) const override { return stream(0, device); }
  Stream getNewStream(Device device, int) const override {
    Locked locked(the_lock);
    return stream(next_stream++, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream other) const override {
    Stream before = getStream(other.device());
    current_stream = other.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream other) const override { return (void*)other.id(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& other) const override {
    Locked locked(the_lock);
    wait_for(clocks[other.id()]);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Locked locked(the_lock);
    wait_for_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& other) const override {
    Locked locked(the_lock);
    if (Block* block = block_of(data.get())) block->recorded.insert(other.id());
  }

  void record(void** event, const Stream& other, const DeviceIndex,
              const c10::EventFlag) const override {
    Locked locked(the_lock);
    if (!*event) *event = new Event;
    ((Event*)*event)->clock = clocks[other.id()];
  }
  void block(void* event, const Stream& other) const override {
    Locked locked(the_lock);
    if (event) join(clocks[other.id()], ((Event*)event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    Locked locked(the_lock);
    if (event) wait_for(((Event*)event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

struct CardGenerator final : at::CPUGeneratorImpl {
  CardGenerator() : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = Device(DeviceType::CUDA, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

inline at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<CardGenerator>();
  return generator;
}

// Returns a generator for the CPU's kernels, whose state must be written back.
inline at::Generator for_cpu(const at::Generator& generator) {
  auto copy = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  copy.set_state(generator.get_state());
  return copy;
}

// torch finds it by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return state.devices; }
  DeviceIndex deviceCount() const override { return state.devices; }
  DeviceIndex current_device() const override { return card::current_device; }
  DeviceIndex getCurrentDevice() const override { return card::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { card::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(card::current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex) const override {
    Locked locked(the_lock);
    wait_for_all();
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<CardGenerator>();
  }
};

}  // namespace card
