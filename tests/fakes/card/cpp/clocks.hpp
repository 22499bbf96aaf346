// Vector clocks: which operations of other streams precede the next one of a stream, or of the
// host.
#pragma once

#include "state.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>

namespace card {

using Clock = std::map<StreamId, Number>;  // of each stream, the last operation that has ended
inline std::map<StreamId, Clock>& clocks = *new std::map<StreamId, Clock>;
inline Clock& host_clock = *new Clock;
inline std::vector<std::string>& races = *new std::vector<std::string>;

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

inline bool covers(const Clock& clock, StreamId stream, Number number) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

// Begins an operation on the current stream; what the host has waited for precedes it.
inline Number begin_operation() {
  Clock& clock = clocks[current_stream];
  join(clock, host_clock);
  return ++clock[current_stream];
}

struct Event {
  Clock clock;
};

inline void report_race(const std::string& race) {
  races.push_back(race);
  if (const char* path = std::getenv("FAKECARD_RACES"))
    std::ofstream(path, std::ios::app) << race << "\n";
}

inline std::string on_stream(StreamId stream) { return " on stream " + std::to_string(stream); }

// One range of a block's bytes: who wrote it last, and who has read it since.
struct Use {
  static constexpr StreamId kNobody = -1;
  int64_t begin, end;
  StreamId writer = kNobody;
  Number written = 0;
  std::string by;
  std::map<StreamId, std::pair<Number, std::string>> readers;
};

// Adds a use of a range by the current stream's present operation; reports what it races with.
inline void add_use(std::vector<Use>& uses, int64_t begin, int64_t end, bool writes,
                    const std::string& operation) {
  const StreamId stream = current_stream;
  const Clock& clock = clocks[stream];
  const Number now = clock.at(stream);
  auto precedes = [&](StreamId other, Number number) {
    return other == stream || covers(clock, other, number);
  };
  const std::string here = operation + on_stream(stream) + (writes ? " writes" : " reads");
  Use* same = nullptr;
  for (Use& use : uses) {
    if (use.end <= begin || end <= use.begin) continue;
    if (use.writer != Use::kNobody && !precedes(use.writer, use.written))
      report_race(here + " memory written by " + use.by + on_stream(use.writer) +
                  " without waiting for it");
    if (writes)
      for (const auto& [reader, read] : use.readers)
        if (!precedes(reader, read.first))
          report_race(here + " memory read by " + read.second + on_stream(reader) +
                      " without waiting for it");
    if (use.begin == begin && use.end == end) same = &use;
  }
  if (writes) {  // what lies inside is overwritten
    std::erase_if(uses, [&](const Use& use) { return begin <= use.begin && use.end <= end; });
    uses.push_back({begin, end, stream, now, operation, {}});
  } else {
    if (!same) same = &uses.emplace_back(Use{begin, end});
    same->readers[stream] = {now, operation};
  }
}

}  // namespace card
