#include "transport/crypto.h"

#include <cstring>

#include <string.h>

namespace horovod::crypto {
namespace {

constexpr const char* kSystemsOwn[] = {"libcrypto.so.3", "libcrypto.so.1.1"};

// EVP_CIPHER_CTX_ctrl, from openssl/evp.h
constexpr int kGetTag = 0x10;
constexpr int kSetTag = 0x11;
constexpr size_t kNonceBytes = 12;  // the default length of AES-GCM's nonce

template <typename Function>
void find(const ImportedLibrary& from, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(from.find(name));
  if (!function) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

std::string bind_all(Library& table, const ImportedLibrary& from) {
  std::string missing;
  table.init.bind(from, missing);
  table.update.bind(from, missing);
  table.final.bind(from, missing);
  table.control.bind(from, missing);
  find(from, "EVP_CIPHER_CTX_new", table.make, missing);
  find(from, "EVP_CIPHER_CTX_free", table.free, missing);
  find(from, "EVP_aes_256_gcm", table.aes_256_gcm, missing);
  find(from, "EVP_sha256", table.sha256, missing);
  find(from, "HMAC", table.hmac, missing);
  return missing;
}

Status load(const std::string& file, Library& table) {
  std::string why;
  for (const char* name : kSystemsOwn) {
    const ImportedLibrary from = ImportedLibrary::open(file.empty() ? name : file);
    if (!from.loaded()) {
      why += (why.empty() ? "" : "; ") + from.why();
      if (!file.empty()) break;
      continue;
    }
    const std::string missing = bind_all(table, from);
    if (missing.empty()) return {};
    why += (why.empty() ? "" : "; ") + (file.empty() ? std::string(name) : file) + " lacks " + missing;
    if (!file.empty()) break;
  }
  return {
      Code::invalid_argument, error_code::missing_library,
      "HOROVOD_WIRE asks for signed or encrypted connections, but OpenSSL's libcrypto can't be used on this host (" +
          why + "). Install it (libssl3 or openssl-libs), or set HOROVOD_WIRE=plain on all ranks."};
}

}  // namespace

const Library* library(const std::string& file, Status& status) { return loaded_once<Library>(file, load, status); }

Aead::Aead(const Library& library, const Key& key, Way way, bool hides, uint64_t records_per_key)
    : library_(library),
      key_(key),
      seals_(way == Way::seal),
      hides_(hides),
      records_per_key_(records_per_key),
      context_(library.make()) {}

Aead::~Aead() {
  if (context_) library_.free(context_);
  explicit_bzero(key_.data(), key_.size());
}

bool Aead::next_key() {
  if (keyed_) {
    static constexpr char kWord[] = "horovod wire next key";
    Key next;
    unsigned bytes = 0;
    if (!library_.hmac(library_.sha256(), key_.data(), kKeyBytes, kWord, sizeof(kWord) - 1, next.data(), &bytes) ||
        bytes != kKeyBytes) {
      return false;
    }
    key_ = next;
    explicit_bzero(next.data(), next.size());
  }
  keyed_ = true;
  return context_ && library_.init(context_, library_.aes_256_gcm(), nullptr, key_.data(), nullptr, seals_) == 1;
}

bool Aead::begin(std::span<const std::byte> header) {
  if (records_ % records_per_key_ == 0 && !next_key()) return false;
  std::array<std::byte, kNonceBytes> nonce{};
  std::memcpy(nonce.data() + kNonceBytes - sizeof(records_), &records_, sizeof(records_));
  ++records_;
  int written = 0;
  return library_.init(context_, nullptr, nullptr, nullptr, nonce.data(), seals_) == 1 &&
         library_.update(context_, nullptr, &written, header.data(), static_cast<int>(header.size())) == 1;
}

bool Aead::seal(std::span<const std::byte> header, std::span<const iovec> pieces, std::byte* out) {
  if (!begin(header)) return false;
  int written = 0;
  for (const iovec& piece : pieces) {
    if (!hides_) std::memcpy(out, piece.iov_base, piece.iov_len);
    // Of a copy, so that the bytes which are authenticated are those which are sent.
    const void* from = hides_ ? piece.iov_base : out;
    if (library_.update(context_, hides_ ? out : nullptr, &written, from, static_cast<int>(piece.iov_len)) != 1) {
      return false;
    }
    out += piece.iov_len;
  }
  return library_.final(context_, out, &written) == 1 &&
         library_.control(context_, kGetTag, static_cast<int>(kTagBytes), out) == 1;
}

bool Aead::open(std::span<const std::byte> header, std::span<std::byte> payload, std::byte* tag) {
  int written = 0;
  std::byte rest[kTagBytes];
  return begin(header) &&
         library_.update(context_, hides_ ? payload.data() : nullptr, &written, payload.data(),
                         static_cast<int>(payload.size())) == 1 &&
         library_.control(context_, kSetTag, static_cast<int>(kTagBytes), tag) == 1 &&
         library_.final(context_, rest, &written) == 1;
}

}  // namespace horovod::crypto
