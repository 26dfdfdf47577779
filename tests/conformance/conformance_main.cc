// main of every conformance test: GoogleTest's flags, ours (--backend) and a closing table of how
// much of each tolerance was used.
#include "absl/flags/parse.h"
#include "gtest/gtest.h"
#include "tests/conformance/check.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  const int status = RUN_ALL_TESTS();
  sinkhorn::conformance::PrintToleranceUse();
  return status;
}
