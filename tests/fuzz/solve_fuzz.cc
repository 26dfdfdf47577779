// Any bytes as the request of Solve.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/solve.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sinkhorn::SolveBytes(absl::string_view(reinterpret_cast<const char*>(data), size), /*in_stream=*/false);
  return 0;
}
