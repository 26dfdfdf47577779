// Linked into a test: its kernels run by the instruction set that SINKHORN_TEST_INSTRUCTION_SET names (SCALAR, AVX2,
// AVX3: Highway's names), as on a processor that has no wider one. Unset or empty: by the best one.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/cpu/targets.h"
//
#include "hwy/highway.h"

namespace sinkhorn::cpu {
namespace {

bool ChooseInstructionSet() {
  const char* name = std::getenv("SINKHORN_TEST_INSTRUCTION_SET");
  if (name == nullptr || *name == 0) return true;
  std::string names;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (name == std::string(hwy::TargetName(target))) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      std::fprintf(stderr, "kernels by %s\n", name);
      return true;
    }
    names += std::string(" ") + hwy::TargetName(target);
  }
  std::fprintf(stderr, "SINKHORN_TEST_INSTRUCTION_SET must be one of%s: %s\n", names.c_str(), name);
  std::abort();
}

const bool kChosen = ChooseInstructionSet();

}  // namespace
}  // namespace sinkhorn::cpu
