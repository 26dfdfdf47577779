// Any bytes as an array on the command line or in a text file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "client/cli/array_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sinkhorn::client;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  for (char row_separator : {'\n', ';'}) {
    for (int min_rank = 0; min_rank <= 2; ++min_rank) {
      const auto read = ParseText(text, row_separator, min_rank);
      if (!read.ok()) {
        if (read.status().message().empty()) std::abort();
        continue;
      }
      size_t elements = 1;
      for (int64_t extent : read->shape()) elements *= static_cast<size_t>(extent);
      if (read->shape_size() < min_rank || read->data().size() != elements * sizeof(float)) std::abort();
    }
  }
  return 0;
}
