#include "server/fault.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace sinkhorn {
namespace {

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(const Faults& faults, std::unique_ptr<Backend> backend)
      : faults_(faults), backend_(std::move(backend)) {}

  DeviceDescription device() const override { return backend_->device(); }
  int lanes() const override { return backend_->lanes(); }
  bool can_finish_soon() const override { return backend_->can_finish_soon(); }
  const char* Unsupported(const Problem& problem) const override { return backend_->Unsupported(problem); }
  std::vector<MemoryUse> memory() const override { return backend_->memory(); }
  int64_t WorkingBytes(const Problem& problem) const override { return backend_->WorkingBytes(problem); }
  double PredictedSeconds(const Problem& problem) const override { return backend_->PredictedSeconds(problem); }

  absl::StatusOr<std::unique_ptr<Solve>> Admit(const Problem& problem) override {
    const int64_t number = ++admissions_;
    if (number == faults_.device_memory) return absl::ResourceExhaustedError("injected: no working memory");
    if (number == faults_.bug) return absl::InternalError("injected: a bug");
    return backend_->Admit(problem);
  }

  absl::Status Advance(int lane, absl::Span<Solve* const> solves, double slice_seconds) override {
    const int64_t number = ++launches_;
    if (number == 1) absl::SleepFor(faults_.slow_start);
    if (faults_.device_lost != 0 && number >= faults_.device_lost) {
      return absl::UnavailableError("injected: the device is lost");
    }
    return backend_->Advance(lane, solves, slice_seconds);
  }

 private:
  const Faults faults_;
  const std::unique_ptr<Backend> backend_;
  std::atomic<int64_t> admissions_{0}, launches_{0};
};

// False: `name` is none, or `value` is not its kind of number.
bool Set(absl::string_view name, absl::string_view value, Faults* faults) {
  if (name == "slow_start") return absl::ParseDuration(value, &faults->slow_start);
  int64_t* number = name == "device_lost"     ? &faults->device_lost
                    : name == "device_memory" ? &faults->device_memory
                    : name == "bug"           ? &faults->bug
                    : name == "kernel_trap"   ? &faults->kernel_trap
                                              : nullptr;
  return number != nullptr && absl::SimpleAtoi(value, number) && *number > 0;
}

}  // namespace

absl::StatusOr<Faults> ParseFaults(absl::string_view text) {
  Faults faults;
  for (absl::string_view word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('@', 1));
    if (!Set(parts.first, parts.second, &faults)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "must be device_lost@N, device_memory@N, bug@N, kernel_trap@N or slow_start@DURATION; got '", word, "'"));
    }
  }
  return faults;
}

std::unique_ptr<Backend> MakeFaultyBackend(const Faults& faults, std::unique_ptr<Backend> backend) {
  return std::make_unique<FaultyBackend>(faults, std::move(backend));
}

}  // namespace sinkhorn
