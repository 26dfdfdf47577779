// Recipes by their knobs, for tests.
#ifndef SINKHORN_TESTS_ORACLE_RECIPES_H_
#define SINKHORN_TESTS_ORACLE_RECIPES_H_

#include <limits>

#include "kernels/problem.h"

namespace sinkhorn::oracle {

struct NamedRecipe {
  const char* name;
  Recipe recipe;
};

inline Recipe CustomRecipe(Start start, double offset, Order order, Guard guard, double guard_value,
                           double logit_floor = -std::numeric_limits<double>::infinity()) {
  return {/*exact=*/false, start, offset, order, guard, guard_value, logit_floor};
}

}  // namespace sinkhorn::oracle

#endif  // SINKHORN_TESTS_ORACLE_RECIPES_H_
