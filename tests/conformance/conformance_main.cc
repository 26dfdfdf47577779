// main of every conformance test: GoogleTest's flags, ours (--backend) and a closing table of how
// much of each tolerance was used.
#include <malloc.h>

#include "absl/flags/parse.h"
#include "gtest/gtest.h"
#include "tests/conformance/check.h"

int main(int argc, char** argv) {
  // Pages of tensors that come and go stay with the process: the system clears each that it hands out.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  const int status = RUN_ALL_TESTS();
  sinkhorn::conformance::PrintToleranceUse();
  return status;
}
