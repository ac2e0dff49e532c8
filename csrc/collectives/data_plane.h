// The means by which a communicator moves data.
#pragma once

#include <vector>

namespace horovod {

class Backend;
class DeviceBackend;
class Mesh;
class Region;
struct Hierarchy;

// Holds a region or a mesh; in a world of one neither.
struct DataPlane {
  Region* region = nullptr;  // of all members
  Mesh* mesh = nullptr;
  Hierarchy* hierarchy = nullptr;   // set beside `mesh` if some members share memory or the mesh is sparse
  Backend* backend = nullptr;       // runs over the mesh, in place of our own algorithms
  DeviceBackend* device = nullptr;  // runs operations on a device; it uses the other members of this struct
  // The members of the mesh that run batches over this plane, this one among them; empty: all. Only Adasum can run on a
  // part of the members.
  std::vector<int> members;
};

}  // namespace horovod
