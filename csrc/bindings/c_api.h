/* The engine for native operations of frameworks, in C.
 *
 * A library that is loaded into the process gets the table below from Python, as the pointer in the capsule
 * horovod._core.C_API ("horovod._core.C_API"): it links to nothing and looks up no symbol, so it does not matter how it
 * and the module were loaded. The engine is that of the world which Python has joined: current_engine(), or the
 * capsule Engine.c_engine().
 *
 * Growth: functions are added at the end of the table, fields at the end of structs. `version` changes only where old
 * callers would break. A caller looks at `table_bytes` before it uses a function of a newer release, and says in
 * struct_bytes how much of a struct it knows; what lies behind is taken to be zero.
 *
 * Threads: every function may be called from any thread, without Python's GIL, also from within `completed`. None
 * throws. A thread that holds the GIL must release it before wait(), and before submit() where another thread needs it.
 *
 * A forked child can't use the engine: current_engine() is null there, and calls fail.
 */
#ifndef HOROVOD_C_API_H
#define HOROVOD_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOROVOD_API_VERSION 1

typedef struct HorovodEngine HorovodEngine;       /* a world of this process */
typedef struct HorovodOperation HorovodOperation; /* an operation that was submitted */

/* What a function returns. last_error() and error_of() say more, in whole sentences for a person. */
enum {
  HOROVOD_OK = 0,
  HOROVOD_TIMEOUT = 1,          /* wait(): not done yet */
  HOROVOD_INVALID_ARGUMENT = 2, /* this call was wrong; the engine stays usable */
  HOROVOD_PRECONDITION = 3,     /* the ranks do not agree on the operation; the engine stays usable */
  HOROVOD_ABORTED = 4,          /* a rank is lost or has left, or the world was shut down: there is no result */
  HOROVOD_INTERNAL = 5          /* no memory, the operating system refused something, or a bug */
};

/* Numbers of types, dtypes and reduce operations: enums in protos/v1/types.proto, OpType, DType, ReduceOp in _core. */

/* One tensor. Its memory is the caller's and must stay as it is until the operation is done; on a GPU, until that has
 * worked the operation off. */
typedef struct {
  const void* input;
  void* output; /* may be `input`; null where the engine allocates the result: allgather, alltoall, reducescatter */
  int32_t dtype;
  int32_t dimensions;
  const int64_t* shape; /* of the input */
} HorovodTensor;

/* Everything is copied before submit() returns. */
typedef struct {
  size_t struct_bytes; /* sizeof(HorovodCall) */
  const char* name;    /* on the wire, UTF-8, for example "allreduce.loss"; one ending in ".noname" matches by order */
  int32_t type;
  int32_t reduce_op; /* allreduce, reducescatter */
  double prescale, postscale;
  int32_t root;        /* broadcast: a rank of the world */
  int32_t process_set; /* the engine's number of a set; 0 is the world */
  const HorovodTensor* tensors;
  size_t tensor_count;
  size_t tensor_bytes;   /* sizeof(HorovodTensor) */
  const int32_t* splits; /* alltoall: rows for each member; null: equal parts */
  size_t split_count;
  int32_t device;     /* the number of the GPU that the tensors are on; -1: the host's memory */
  int32_t waits_next; /* not 0: this thread calls wait() next and submits nothing before, so no other is woken */
  uintptr_t stream;   /* GPU: of the work that makes the tensors ready; 0: the default one */
  /* Called once when the operation is done or has failed, if submit() returned HOROVOD_OK; perhaps before it returns.
   * By a thread of the engine that does only this and holds no lock: it may call every function here, and take locks
   * under which others submit. While it waits, other operations go on but their `completed` waits behind. `operation`
   * is the one that submit() gives out; one of the two releases it. Null: there is no callback. */
  void (*completed)(HorovodOperation* operation, void* context);
  void* context;
  /* Called once when the operation is released and the engine uses the memory of its tensors no more, also where
   * submit() fails; on any thread, with no lock held. For a caller that releases what is not done. Null: the caller
   * keeps the memory until it knows that the operation is done. */
  void (*unused)(void* context);
  /* Not 0: started at once, though no thread waits for it. 0: where no thread waits, the engine lets a few tenths of a
   * millisecond pass in which other small operations may join it in one batch. For an operation that is alone, and
   * whose `completed` is what the program waits for. */
  int32_t starts_at_once;
  /* Not 0: a thread of the user's script calls wait() until it is done, and starts nothing before. 0: a graph of the
   * framework may start others meanwhile, so that wait() says nothing of what this process may still do; the engine
   * then takes longer to find that ranks wait for each other. */
  int32_t by_script;
} HorovodCall;

/* A result in memory that the engine allocated, now the caller's. */
typedef struct {
  size_t struct_bytes; /* sizeof(HorovodResult), set by the caller */
  void* data;          /* 64-byte aligned in the host's memory */
  size_t bytes;
  int32_t dtype;
  int32_t dimensions;
  const int64_t* shape; /* as long as the result */
  int32_t device;       /* -1: the host's memory */
  int32_t reserved;
  void* owner; /* for release_result() */
} HorovodResult;

typedef struct {
  int32_t version; /* HOROVOD_API_VERSION */
  int32_t reserved;
  size_t table_bytes; /* sizeof(HorovodApi) of the release that is loaded */

  /* Why the last call of this thread failed; until its next call. */
  const char* (*last_error)(void);

  /* A new reference to the engine of hvd.init(); null before it and after hvd.shutdown(). One that is kept over a
   * shutdown belongs to the old world, where every call fails with HOROVOD_ABORTED. */
  HorovodEngine* (*current_engine)(void);
  void (*retain_engine)(HorovodEngine* engine);
  void (*release_engine)(HorovodEngine* engine);

  /* Starts an operation. `operation` may be null where `completed` releases it. */
  int32_t (*submit)(HorovodEngine* engine, const HorovodCall* call, HorovodOperation** operation);
  /* Until it is done; helps with the work meanwhile. Its outcome, or HOROVOD_TIMEOUT. timeout_us < 0: without limit. */
  int32_t (*wait)(HorovodOperation* operation, int64_t timeout_us);
  /* Whether it is done, whatever came of it. On a GPU it is done when it is queued there; see collect(). */
  int32_t (*poll)(HorovodOperation* operation);
  /* Why it failed; "" if it did not. Of an operation that is done, until its release. */
  const char* (*error_of)(HorovodOperation* operation);
  /* GPU: what is queued on `stream` from now on finds the result. Once, of an operation that is done. */
  int32_t (*collect)(HorovodOperation* operation, uintptr_t stream);
  /* Of an operation that is done, and on a GPU collected: moves the result of a tensor out. Once for each. */
  int32_t (*take_result)(HorovodOperation* operation, size_t tensor, HorovodResult* result);
  void (*release_result)(HorovodResult* result);
  /* alltoall: how many rows came from each member; until the operation's release. */
  int32_t (*received_splits)(HorovodOperation* operation, const int32_t** rows, size_t* count);
  /* The caller's last use of it. One that is not done goes on, and the memory of its tensors is used until `unused`. */
  void (*release)(HorovodOperation* operation);
  /* This process's rank in the engine's world; -1 where that was shut down. */
  int32_t (*rank)(HorovodEngine* engine);
  /* For a thread that has waited for a moment and goes, of an operation without a `completed`: 1, and it is told of the
   * end as HorovodCall says; or 0 and no callback, since the operation is done. */
  int32_t (*tell_when_done)(HorovodOperation* operation, void (*completed)(HorovodOperation* operation, void* context),
                            void* context);
  /* GPU: queues a copy from one place of its memory to another on `stream`. Of the GPU from which the engine
   * communicates; `device` is its number. */
  int32_t (*copy_on_gpu)(HorovodEngine* engine, int32_t device, void* to, const void* from, size_t bytes,
                         uintptr_t stream);
} HorovodApi;

#ifdef __cplusplus
}

namespace horovod {
const HorovodApi* horovod_api();
}
#endif

#endif
