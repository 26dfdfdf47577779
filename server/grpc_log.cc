#include "server/grpc_log.h"

#include <grpc/support/log.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/log.h"

namespace sinkhorn {
namespace {

void Forward(gpr_log_func_args* said) {
  absl::string_view file = said->file;
  file.remove_prefix(file.rfind('/') + 1);  // npos + 1 is 0.
  Log(said->severity == GPR_LOG_SEVERITY_ERROR ? Severity::kWarning : Severity::kInfo, "grpc",
      {{"where", absl::StrCat(file, ":", said->line)}, {"message", std::string(said->message)}});
}

}  // namespace

void ForwardGrpcLog() { gpr_set_log_function(Forward); }

}  // namespace sinkhorn
