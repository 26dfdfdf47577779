// What `sinkhorn solve` says of an answer: a summary for people, or JSON for programs, and .npy files of the outputs.
#ifndef SINKHORN_CLIENT_CLI_SOLVE_REPORT_H_
#define SINKHORN_CLIENT_CLI_SOLVE_REPORT_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

// Output name to the path of its file. Empty: nothing was saved.
using SavedFiles = std::map<std::string, std::string>;

// Writes every array of the answer (`value` and its relatives too, as float64) to DIRECTORY/NAME.npy; makes the
// directory.
absl::StatusOr<SavedFiles> SaveOutputs(const v1::SolveResponse& response, const std::string& directory);

// Lines for people. Small arrays that were not saved are printed in full.
std::string Summary(const v1::SolveRequest& request, const v1::SolveResponse& response, absl::Duration round_trip,
                    const SavedFiles& saved);

// One object: the fields of the reply, `round_trip_seconds`, and for each array its dtype, shape and either `file` or,
// up to a million elements, `data`.
std::string SolveJson(const v1::SolveResponse& response, absl::Duration round_trip, const SavedFiles& saved);

// {"error": {"code": ..., "reason": ..., "message": ..., "fields": [...], "metadata": {...}}}
std::string ErrorJson(const absl::Status& status);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CLI_SOLVE_REPORT_H_
