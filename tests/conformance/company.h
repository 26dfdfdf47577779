// Problems solved alone, together and as members of one, and how their answers compare.
#ifndef SINKHORN_TESTS_CONFORMANCE_COMPANY_H_
#define SINKHORN_TESTS_CONFORMANCE_COMPANY_H_

#include <vector>

#include "kernels/backend.h"
#include "tests/conformance/case.h"

namespace sinkhorn::conformance {

std::vector<const Case*> PointersTo(const std::vector<Case>& cases);

// Each by itself.
std::vector<Answer> AllAlone(Backend* backend, const std::vector<const Case*>& cases);

void ExpectSameBits(const std::vector<const Case*>& cases, const std::vector<Answer>& actual,
                    const std::vector<Answer>& expected);

// A batch of `count` members has the bits of `count` problems.
void ExpectMembersAreProblems(Backend* backend, const Case& c);

// The largest difference of a potential; infinite if one is no number.
double Distance(const Answer& answer, const Answer& exact);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_COMPANY_H_
