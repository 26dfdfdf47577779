// One line for each family, and its library in the BUILD file.
#include "kernels/cuda/families.h"

namespace sinkhorn {
namespace cuda {

const std::vector<const Family*>& Families() {
  static const auto* const kFamilies = new std::vector<const Family*>{
      RegisterNormalization(),
      OnChipNormalization(),
      Transport(),
  };
  return *kFamilies;
}

}  // namespace cuda
}  // namespace sinkhorn
