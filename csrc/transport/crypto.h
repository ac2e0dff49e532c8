// The functions of OpenSSL's libcrypto that the data plane calls, loaded when a mesh needs them (base/imported.h); and
// AES-GCM with them, for one direction of one connection.
//
// The declarations follow OpenSSL's manual (docs.openssl.org, EVP_EncryptInit and HMAC), which is the same for 1.1
// and 3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <sys/uio.h>

#include "base/imported.h"

namespace horovod::crypto {

inline constexpr size_t kKeyBytes = 32;
inline constexpr size_t kTagBytes = 16;
using Key = std::array<std::byte, kKeyBytes>;

using Context = struct OpaqueCipherContext*;  // EVP_CIPHER_CTX
using Cipher = const struct OpaqueCipher*;    // EVP_CIPHER
using Digest = const struct OpaqueDigest*;    // EVP_MD

struct Library {  // these functions return 1 for success
  Imported<Context, Cipher, void*, const void*, const void*, int> init{"EVP_CipherInit_ex"};
  Imported<Context, void*, int*, const void*, int> update{"EVP_CipherUpdate"};
  Imported<Context, void*, int*> final{"EVP_CipherFinal_ex"};
  Imported<Context, int, int, void*> control{"EVP_CIPHER_CTX_ctrl"};
  Context (*make)() = nullptr;
  void (*free)(Context) = nullptr;
  Cipher (*aes_256_gcm)() = nullptr;
  Digest (*sha256)() = nullptr;
  unsigned char* (*hmac)(Digest, const void* key, int key_bytes, const void* data, size_t bytes, void* out,
                         unsigned* out_bytes) = nullptr;
};

// The functions of the library in `file`, or of the system's library where `file` is empty; loaded once. Null where no
// library can be used; `status` then says what was tried and what to do. Any thread.
const Library* library(const std::string& file, Status& status);

// Seals or opens records in order. The nonce of a record is its number, and a key is replaced by one that follows from
// it after so many records, long before AES-GCM wears out (RFC 8446, section 5.5: 2^24.5 records of 16 KB). So no nonce
// comes twice under one key as long as a Key is given to one Aead only.
class Aead {
 public:
  enum class Way { seal, open };
  static constexpr uint64_t kRecordsPerKey = 1u << 20;

  // `hides`: whether the payload is encrypted; otherwise it is authenticated only.
  Aead(const Library& library, const Key& key, Way way, bool hides, uint64_t records_per_key = kRecordsPerKey);
  ~Aead();
  Aead(const Aead&) = delete;
  Aead& operator=(const Aead&) = delete;

  // Sealing: writes the pieces, one behind the other, and then the tag to `out`. The header is authenticated as well.
  [[nodiscard]] bool seal(std::span<const std::byte> header, std::span<const iovec> pieces, std::byte* out);
  // Opening: checks the record and decrypts it in place. False when header, payload or tag differ from what was sealed
  // as the record of this number.
  [[nodiscard]] bool open(std::span<const std::byte> header, std::span<std::byte> payload, std::byte* tag);

  uint64_t records() const { return records_; }

 private:
  bool begin(std::span<const std::byte> header);
  bool next_key();

  const Library& library_;
  Key key_;
  const bool seals_;
  const bool hides_;
  const uint64_t records_per_key_;
  uint64_t records_ = 0;
  bool keyed_ = false;
  Context context_ = nullptr;
};

}  // namespace horovod::crypto
