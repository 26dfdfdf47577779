// The result of a load: a table for people, an object for programs.
#ifndef SINKHORN_CLIENT_LOADGEN_LOAD_REPORT_H_
#define SINKHORN_CLIENT_LOADGEN_LOAD_REPORT_H_

#include <string>

#include "client/loadgen/load.h"

namespace sinkhorn::client {

std::string LoadText(const LoadOptions& options, const LoadResult& result);

// Times in seconds.
std::string LoadJson(const LoadOptions& options, const LoadResult& result);

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_LOAD_REPORT_H_
