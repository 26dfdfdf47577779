// Who may call: the bearer tokens of a file.
//
// The file has a token a line, of 16 printable characters or more without spaces; empty lines and those that begin with
// '#' do not count. Several are for changing them without a failed call: add the new one, move the clients, take the
// old one out. The file is looked at every two seconds; one that is damaged then is logged and changes nothing.
#ifndef SINKHORN_SERVER_TOKENS_H_
#define SINKHORN_SERVER_TOKENS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/line_file.h"

namespace sinkhorn {

class Tokens {
 public:
  // INVALID_ARGUMENT: `path` cannot be read or is not such a file. No message repeats what is in it.
  static absl::StatusOr<std::unique_ptr<Tokens>> Load(const std::string& path);

  // Whether `authorization`, the value of that header, is "Bearer TOKEN" with one of the tokens. The time it takes
  // tells nothing about them but how many there are. Any thread.
  bool Allow(absl::string_view authorization);
  // The token in such a value; empty: there is none.
  static absl::string_view In(absl::string_view authorization);

 private:
  using List = std::vector<std::string>;
  explicit Tokens(const std::string& path) : file_("token file", path) {}
  absl::StatusOr<List> Read() const;
  void Refresh();

  LineFile file_;
  std::shared_ptr<const List> tokens_;  // Read and replaced atomically.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_TOKENS_H_
