// A small file of settings, an entry a line, that is looked at again while the server runs.
#ifndef SINKHORN_SERVER_LINE_FILE_H_
#define SINKHORN_SERVER_LINE_FILE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace sinkhorn {

class LineFile {
 public:
  // `what` names it in errors: "token file".
  LineFile(const std::string& what, std::string path) : name_(what + " '" + path + "'"), path_(std::move(path)) {}

  const std::string& name() const { return name_; }  // "token file '/etc/tokens'".

  // Gives `take` each line, without space at its ends, that is not empty and does not begin with '#'. `take` returns
  // what the line must be, or "" if it is.
  // INVALID_ARGUMENT: the file cannot be read, or a line is not what it must be: which one, never what is in it.
  absl::Status Read(absl::FunctionRef<std::string(std::string line)> take) const;

  // Whether to read it again: true for one caller every two seconds; the first call's time counts as the start. Any
  // thread.
  bool IsDue(absl::Time now);

 private:
  const std::string name_, path_;
  std::atomic<int64_t> due_ns_{INT64_MIN};
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_LINE_FILE_H_
