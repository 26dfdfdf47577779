// Who shares the devices with whom: identities of callers, numbered for the scheduler, and what each weighs.
//
// An identity is a word that the server has checked: "cert:SUBJECT" of a client's certificate, "token:DIGEST" of a
// bearer token (the first 12 hexadecimal digits of its SHA-256), else "peer:ADDRESS" without the port. What a caller
// merely says of itself does not count.
//
// At most kTenants at a time: further identities share number 0, "others", which weighs 1. One that has not been seen
// for kForget makes room. The file of weights has an identity and a number > 0 a line, and "* WEIGHT" for those not
// named; empty lines and those that begin with '#' do not count. It is looked at every two seconds; one that is damaged
// then is logged and changes nothing.
//
// Metrics know by name whom the file names, and all others as "other": whoever merely calls makes no label.
#ifndef SINKHORN_SERVER_TENANTS_H_
#define SINKHORN_SERVER_TENANTS_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/line_file.h"

namespace sinkhorn {

struct Tenant {
  int number = 0;
  double weight = 1;
  int label = 0;  // Of metrics, in [0, kLabels).
};

class Tenants {
 public:
  static constexpr int kTenants = 64;
  static constexpr int kLabels = 65;  // "other", and the first identities that the file has ever named.
  static constexpr absl::Duration kForget = absl::Minutes(10);

  // All weigh 1.
  Tenants() = default;
  // INVALID_ARGUMENT: `path` cannot be read or is not such a file.
  static absl::StatusOr<std::unique_ptr<Tenants>> Load(const std::string& path);

  // Any thread.
  Tenant Of(absl::string_view identity, absl::Time now);
  // Identities that have a number of their own now.
  int count() const;
  // What the labels are called, label 0 first; later ones may be added.
  std::vector<std::string> labels() const;

 private:
  struct Entry {
    Tenant tenant;
    absl::Time seen;
  };
  struct Weights {
    std::map<std::string, double> named;
    double others = 1;
    std::vector<std::string> order;  // As the file names them.
    bool operator==(const Weights& other) const {
      return order == other.order && named == other.named && others == other.others;
    }
  };
  absl::StatusOr<Weights> Read() const;
  void Refresh(absl::Time now);
  void Take(Weights weights);
  Tenant Weighed(int number, const std::string& identity) const;
  int TakeNumber(absl::Time now);

  std::unique_ptr<LineFile> file_;  // Null: there is none.

  mutable std::mutex mutex_;
  Weights weights_;
  std::vector<std::string> labels_ = {"other"};
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<int> free_;  // Numbers given back.
  int used_ = 0;           // Numbers ever given out; 1 .. used_.
};

// "ipv4:127.0.0.1:50000" -> "peer:ipv4:127.0.0.1".
std::string PeerIdentity(absl::string_view peer);
// The digest of a secret that may be shown.
std::string TokenIdentity(absl::string_view token);

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_TENANTS_H_
