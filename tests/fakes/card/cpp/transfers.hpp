// Copies between pinned memory and the card that the host does not wait for. A download reaches the
// host as late as it may: its bytes are 0xEE until the host waits for it. An upload reads the
// host's memory as late as it may: when the card uses the tensor, or the host waits.
#pragma once

#include "clocks.hpp"

#include <cstring>
#include <functional>

namespace card {

struct Download {
  StreamId stream;
  Number number;
  char* target;
  std::vector<char> bytes;
  c10::Storage kept;  // the target's

  bool overlaps(const char* begin, const char* end) const {
    return target < end && begin < target + bytes.size();
  }
};
inline std::vector<Download>& downloads = *new std::vector<Download>;

struct Upload {
  StreamId stream;
  Number number;
  Tensor target, source;    // the host's views
  void* block;              // of the card, to which the target belongs
  const char *begin, *end;  // the source's bytes

  bool overlaps(const char* from, const char* to) const { return begin < to && from < end; }
};
inline std::vector<Upload>& uploads = *new std::vector<Upload>;

inline void finish_downloads(const std::function<bool(const Download&)>& is_due) {
  std::erase_if(downloads, [&](const Download& download) {
    if (!is_due(download)) return false;
    std::memcpy(download.target, download.bytes.data(), download.bytes.size());
    return true;
  });
}

inline void finish_uploads(const std::function<bool(const Upload&)>& is_due) {
  std::vector<Upload> all;
  all.swap(uploads);  // a copy below may come back here
  for (Upload& upload : all) {
    if (!is_due(upload)) {
      uploads.push_back(std::move(upload));
      continue;
    }
    finish_downloads([&](const Download& d) { return d.overlaps(upload.begin, upload.end); });
    c10::impl::ExcludeDispatchKeyGuard no_gradients(c10::autograd_dispatch_keyset);
    upload.target.copy_(upload.source);
  }
}

// Lets the host wait until the card has done what a clock has seen.
inline void wait_for(const Clock& clock) {
  state.syncs++;
  TORCH_CHECK(!state.refuse_sync, "called a synchronizing CUDA operation");
  join(host_clock, clock);
  finish_uploads([](const Upload& u) { return covers(host_clock, u.stream, u.number); });
  finish_downloads([](const Download& d) { return covers(host_clock, d.stream, d.number); });
}

inline void wait_for_all() {
  Clock all;
  for (const auto& [stream, clock] : clocks) join(all, clock);
  wait_for(all);
}

}  // namespace card
