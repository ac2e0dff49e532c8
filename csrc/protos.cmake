# Makes horovod.protos from protos/: protoc writes descriptors, protos/generate.py modules with them, and mypy-protobuf's
# plug-ins type stubs. Nothing here depends on the protobuf and grpcio that a user has (docs/adr/0069). The mapping
# -Ihorovod/protos=<repo>/protos makes imports read `horovod.protos.v1`, so nothing is rewritten afterwards.
set(proto_root ${CMAKE_CURRENT_SOURCE_DIR}/../protos)
file(GLOB_RECURSE proto_files CONFIGURE_DEPENDS RELATIVE ${proto_root} ${proto_root}/*.proto)

set(proto_output ${CMAKE_CURRENT_BINARY_DIR}/protos)
set(proto_package ${proto_output}/horovod/protos)
set(generated)
set(proto_names)
set(packages)
foreach(file ${proto_files})
  string(REGEX REPLACE "\\.proto$" "" stem ${file})
  list(APPEND generated ${proto_package}/${stem}_pb2.py)
  list(APPEND proto_names horovod/protos/${file})
  list(APPEND proto_sources ${proto_root}/${file})
  get_filename_component(package ${stem} DIRECTORY)
  list(APPEND packages ${package})
endforeach()
list(REMOVE_DUPLICATES packages)

file(MAKE_DIRECTORY ${proto_package})
file(WRITE ${proto_package}/__init__.py "\"\"\"Made from protos/.\"\"\"\n")
file(WRITE ${proto_package}/py.typed "")
foreach(package ${packages})
  file(WRITE ${proto_package}/${package}/__init__.py "\"\"\"Made from protos/${package}/.\"\"\"\n")
endforeach()
foreach(module messages services)
  configure_file(${proto_root}/python/${module}.py ${proto_package}/${module}.py COPYONLY)
endforeach()

get_filename_component(python_bin ${Python_EXECUTABLE} DIRECTORY)
find_program(PROTOC_GEN_MYPY protoc-gen-mypy HINTS ${python_bin} REQUIRED)
find_program(PROTOC_GEN_MYPY_GRPC protoc-gen-mypy_grpc HINTS ${python_bin} REQUIRED)
set(descriptors ${CMAKE_CURRENT_BINARY_DIR}/descriptors.binpb)
add_custom_command(
  OUTPUT ${generated}
  COMMAND ${Python_EXECUTABLE} -m grpc_tools.protoc
    -Ihorovod/protos=${proto_root}
    --plugin=protoc-gen-mypy=${PROTOC_GEN_MYPY}
    --plugin=protoc-gen-mypy_grpc=${PROTOC_GEN_MYPY_GRPC}
    --include_imports --descriptor_set_out=${descriptors}
    --mypy_out=quiet:${proto_output} --mypy_grpc_out=quiet:${proto_output}
    ${proto_names}
  COMMAND ${Python_EXECUTABLE} ${proto_root}/generate.py ${descriptors} ${proto_output}
  DEPENDS ${proto_sources} ${proto_root}/generate.py
  COMMENT "Making horovod.protos"
  VERBATIM)
add_custom_target(horovod_protos ALL DEPENDS ${generated})
install(DIRECTORY ${proto_package} DESTINATION horovod)
