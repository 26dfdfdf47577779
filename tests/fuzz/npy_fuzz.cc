// Any bytes as a .npy file: what is read can be written, and read again as the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "client/cpp/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sinkhorn::client;
  const auto read = ParseNpy(absl::string_view(reinterpret_cast<const char*>(data), size));
  if (!read.ok()) {
    if (read.status().message().empty()) std::abort();
    return 0;
  }
  const auto written = FormatNpy(*read);
  if (!written.ok()) std::abort();
  const auto again = ParseNpy(*written);
  if (!again.ok() || again->SerializeAsString() != read->SerializeAsString()) std::abort();
  return 0;
}
