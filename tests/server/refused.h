// Rules of the contract, each with a request that breaks it.
#ifndef SINKHORN_TESTS_SERVER_REFUSED_H_
#define SINKHORN_TESTS_SERVER_REFUSED_H_

#include <functional>
#include <vector>

#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// `base` is valid; after `change` it is refused with this field and reason.
struct Refused {
  const char* name;
  v1::SolveRequest (*base)();
  std::function<void(v1::SolveRequest*)> change;
  const char* field;
  const char* reason = "INVALID_FIELD";
};

// refused_problems.cc
std::vector<Refused> TensorRules();
std::vector<Refused> NormalizationRules();
std::vector<Refused> TransportRules();
// refused_options.cc
std::vector<Refused> SolverRules();
std::vector<Refused> OutputRules();
std::vector<Refused> LimitRules();  // The limits are those of refused_test.cc.

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SERVER_REFUSED_H_
