#include "server/trace.h"

#include <algorithm>

namespace sinkhorn {
namespace {

constexpr size_t kTraceIdDigits = 32;
constexpr absl::string_view kForm = "xx-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-xxxxxxxxxxxxxxxx-xx";

bool IsLowerHex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

bool IsZero(absl::string_view digits) {
  return std::all_of(digits.begin(), digits.end(), [](char c) { return c == '0'; });
}

}  // namespace

absl::string_view TraceIdOf(absl::string_view traceparent) {
  if (traceparent.size() < kForm.size()) return {};
  for (size_t i = 0; i < kForm.size(); ++i) {
    if (kForm[i] == '-' ? traceparent[i] != '-' : !IsLowerHex(traceparent[i])) return {};
  }
  const absl::string_view version = traceparent.substr(0, 2);
  if (version == "ff") return {};
  if (traceparent.size() > kForm.size() && (version == "00" || traceparent[kForm.size()] != '-')) return {};
  const absl::string_view trace = traceparent.substr(3, kTraceIdDigits);
  const absl::string_view parent = traceparent.substr(4 + kTraceIdDigits, 16);
  return IsZero(trace) || IsZero(parent) ? absl::string_view() : trace;
}

}  // namespace sinkhorn
