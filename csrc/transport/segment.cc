#include "transport/segment.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/wait.h"

namespace horovod {
namespace {

Status system_error(const std::string& what) {
  return {Code::internal, error_code::shared_memory, what + ": " + std::strerror(errno) + "."};
}

// Whether the last call failed for want of descriptors; `status` then says that, instead of naming other causes.
bool out_of_descriptors(const char* what, Status& status) {
  if (errno == ENFILE) {
    status = {Code::internal, error_code::too_many_open_files,
              std::string("Could not ") + what +
                  ": all processes of this host together have too many open files (sysctl "
                  "fs.file-max)."};
    return true;
  }
  if (errno != EMFILE) return false;
  struct rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  status = {Code::internal, error_code::too_many_open_files,
            std::string("Could not ") + what + ": this process has too many open files; its limit is " +
                std::to_string(limit.rlim_cur) + ", which `ulimit -n` can raise up to " +
                std::to_string(limit.rlim_max) + "."};
  return true;
}

uint64_t random_nonce() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// In-process segments by nonce. A member that opens one shares its ownership, because its owner may leave first.
struct InProcess {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<Segment>> segments;

  static InProcess& instance() {
    static auto* const one = new InProcess();  // never destroyed: engines may end after static objects do
    return *one;
  }
};

// Seals the size, so that no process can change it: to touch memory beyond the end of a file raises SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int open_pidfd(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes, bool in_process, Status& status) {
  std::shared_ptr<Segment> segment(new Segment());
  segment->bytes_ = bytes;
  segment->owner_process_ = getpid();
  char address[96];
  const uint64_t nonce = random_nonce();
  if (in_process) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      status = system_error("Could not allocate an in-process segment");
      return nullptr;
    }
    segment->data_ = static_cast<std::byte*>(memory);
    segment->mapped_ = true;
    std::snprintf(address, sizeof address, "inproc:%016" PRIx64, nonce);
    segment->in_process_nonce_ = nonce;
    InProcess& known = InProcess::instance();
    const std::lock_guard<std::mutex> lock(known.mutex);
    known.segments[nonce] = segment;
  } else {
    segment->fd_ = memfd_create("horovod", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd_ < 0 && out_of_descriptors("create a shared-memory segment", status)) return nullptr;
    if (segment->fd_ < 0 || ftruncate(segment->fd_, static_cast<off_t>(bytes)) != 0 ||
        fcntl(segment->fd_, F_ADD_SEALS, kSeals) != 0) {
      status =
          system_error("Could not create a shared-memory segment (memfd); set HOROVOD_TRANSPORT=tcp to do without");
      return nullptr;
    }
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd_, 0);
    if (memory == MAP_FAILED) {
      status = system_error("Could not map a shared-memory segment");
      return nullptr;
    }
    segment->data_ = static_cast<std::byte*>(memory);
    segment->mapped_ = true;
    madvise(memory, bytes, MADV_DONTFORK);  // a forked child is no member; it must not keep our peers' memory alive
    std::snprintf(address, sizeof address, "memfd:%d:%d:%016" PRIx64, getpid(), segment->fd_, nonce);
  }
  segment->address_ = address;
  SegmentHeader& header = segment->header();
  header.nonce = nonce;
  header.bytes = bytes;
  header.magic = SegmentHeader::kMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const std::string& address, size_t bytes, Status& status) {
  std::shared_ptr<Segment> segment(new Segment());
  segment->address_ = address;
  segment->bytes_ = bytes;
  segment->owner_process_ = getpid();
  int pid = 0, fd = -1;
  uint64_t nonce = 0;
  if (std::sscanf(address.c_str(), "inproc:%16" SCNx64, &nonce) == 1) {
    InProcess& known = InProcess::instance();
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.segments.find(nonce);
    if (found != known.segments.end()) segment->origin_ = found->second.lock();
    if (!segment->origin_) {
      status = {Code::internal, error_code::shared_memory,
                "The segment at " + address + " is gone; its owner has left."};
      return nullptr;
    }
    segment->data_ = segment->origin_->data_;
  } else if (std::sscanf(address.c_str(), "memfd:%d:%d:%16" SCNx64, &pid, &fd, &nonce) == 3) {
    // The pidfd comes first: if it names the process that still shows the right nonce afterwards, it names the owner.
    if (pid != getpid()) segment->pidfd_ = open_pidfd(pid);
    if (pid != getpid() && segment->pidfd_ < 0 && out_of_descriptors("watch a local peer", status)) return nullptr;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    segment->fd_ = ::open(path, O_RDWR | O_CLOEXEC);
    if (segment->fd_ < 0 && out_of_descriptors("open the shared segment of a local peer", status)) return nullptr;
    // The seals are read before the size, which may change until they are set. A file that is no memfd answers with -1.
    const int seals = segment->fd_ < 0 ? 0 : fcntl(segment->fd_, F_GET_SEALS);
    struct stat info{};
    if (segment->fd_ < 0 || fstat(segment->fd_, &info) != 0) {
      status = system_error(std::string("Could not open the shared segment of a local peer at ") + path +
                            " (its process may have ended; processes that share memory must run as one user in one pid "
                            "namespace, otherwise set HOROVOD_TRANSPORT=tcp)");
      return nullptr;
    }
    if (static_cast<size_t>(info.st_size) != bytes) {
      status = {Code::internal, error_code::shared_memory,
                std::string("The shared segment at ") + path + " has " + std::to_string(info.st_size) +
                    " bytes where " + std::to_string(bytes) +
                    " were expected; do all ranks use the same settings and version?"};
      return nullptr;
    }
    if (seals < 0 || (seals & kSeals) != kSeals) {
      status = {Code::internal, error_code::shared_memory,
                std::string("The shared segment at ") + path +
                    " is not sealed, so its owner could make it smaller under this process; do all "
                    "ranks use the same version?"};
      return nullptr;
    }
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd_, 0);
    if (memory == MAP_FAILED) {
      status = system_error("Could not map the shared segment of a local peer");
      return nullptr;
    }
    close(segment->fd_);
    segment->fd_ = -1;
    segment->data_ = static_cast<std::byte*>(memory);
    segment->mapped_ = true;
    madvise(memory, bytes, MADV_DONTFORK);
  } else {
    status = {Code::internal, error_code::shared_memory, "'" + address + "' is not the address of a shared segment."};
    return nullptr;
  }
  const SegmentHeader& header = segment->header();
  if (header.magic != SegmentHeader::kMagic || header.nonce != nonce || header.bytes != bytes) {
    status = {Code::internal, error_code::shared_memory,
              "The shared segment at " + address +
                  " is not the one its owner announced; its process ended or runs another version."};
    return nullptr;
  }
  segment->header().attached.fetch_add(1, std::memory_order_release);
  futex_wake_all(&segment->header().attached);
  return segment;
}

uint32_t Segment::await_attached(uint32_t peers, int64_t timeout_us) const {
  const std::atomic<uint32_t>& attached = header().attached;
  uint32_t count = 0;
  const auto all_came = [&] { return (count = attached.load(std::memory_order_acquire)) >= peers; };
  sleep_on(attached, now_us() + timeout_us, all_came, [] {});
  return count;
}

Segment::~Segment() {
  if (owner_process_ != getpid()) return;  // in a forked child the mapping does not exist (MADV_DONTFORK)
  if (in_process_nonce_ != 0) {
    InProcess& known = InProcess::instance();
    const std::lock_guard<std::mutex> lock(known.mutex);
    known.segments.erase(in_process_nonce_);
  }
  if (mapped_) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
  if (pidfd_ >= 0) close(pidfd_);
}

}  // namespace horovod
