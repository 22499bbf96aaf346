// What the card is set to and counts. Everything here is guarded by one lock; what other threads
// may use while the process ends is never destroyed.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace card {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using StreamId = int64_t;
using Number = int64_t;  // of an operation on its stream

inline std::recursive_mutex& the_lock = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

struct State {
  int64_t capacity = 0, limit = int64_t(1) << 60;
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0;
  int64_t allocations = 0;
  int64_t fail_at = -1;    // how many allocations succeed before one fails; -1: none fails
  int64_t fail_least = 0;  // smaller ones, in bytes, do not count
  int64_t syncs = 0;       // how often the host waited for the card
  int64_t pinned = 0, pinned_allocations = 0;
  int devices = 1;
  bool refuse_sync = false;
  bool expandable = false;  // whether new segments can grow
};
inline State state;

inline thread_local StreamId current_stream = 0;
inline thread_local DeviceIndex current_device = 0;
inline StreamId next_stream = 1;

inline std::set<std::string>& takes_scalars = *new std::set<std::string>;

// Makes a device the present one until the end of the block.
struct OnDevice {
  DeviceIndex before = current_device;
  explicit OnDevice(Device device) {
    if (device.is_cuda() && device.index() >= 0) current_device = device.index();
  }
  ~OnDevice() { current_device = before; }
};

}  // namespace card
