// Hessian-vector products compared with the oracle's.
#ifndef SINKHORN_TESTS_CONFORMANCE_CHECK_HESSIAN_H_
#define SINKHORN_TESTS_CONFORMANCE_CHECK_HESSIAN_H_

#include "tests/conformance/case.h"

namespace sinkhorn::conformance {

// Compares products of one member, each direction's with the oracle's at the solution. REQUIRES: squared distances,
// cosines or dots; potentials converged, STRICT to marginal errors of 1e-6, DOUBLE to 1e-13.
void ExpectMatchesHessian(const Case& member_case, const Answer& member);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_CHECK_HESSIAN_H_
