// A family for tests of the backend: it solves nothing, so that what is tested is the way there and back.
//
// Dense problems, float32:  plan = 2 cost + 1,  f[i] = sum over j of cost[i, j],  iterations = slices taken.
// `solver` says how it behaves:
//   max_iterations   slices that the problem takes
//   epsilon          one of the behaviours below
//   tolerance        seconds that each of its slices takes
//   update_rule      kAlternating: reads its inputs once; kSymmetric: says that it does not
#ifndef SINKHORN_KERNELS_CUDA_ECHO_FAMILY_H_
#define SINKHORN_KERNELS_CUDA_ECHO_FAMILY_H_

#include "kernels/cuda/family.h"

namespace sinkhorn {
namespace cuda {

constexpr double kEchoWell = 1;
constexpr double kEchoDiverges = 2;      // FAILED_PRECONDITION.
constexpr double kEchoTraps = 3;         // Its kernel ends the context.
constexpr double kEchoWantsTheMoon = 4;  // Asks for more scratch than there is: RESOURCE_EXHAUSTED.
constexpr double kEchoIsRefused = 5;     // One of its launches is, and later calls succeed: the slice fails, INTERNAL.

const Family* EchoFamily();

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_ECHO_FAMILY_H_
