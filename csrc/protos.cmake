# Generates horovod.protos (code and type stubs) from protos/. The mapping -Ihorovod/protos=<repo>/protos makes generated
# imports read `horovod.protos.v1`, so nothing is rewritten afterwards.
set(proto_root ${CMAKE_CURRENT_SOURCE_DIR}/../protos)
file(GLOB_RECURSE proto_files CONFIGURE_DEPENDS RELATIVE ${proto_root} ${proto_root}/*.proto)

set(proto_output ${CMAKE_CURRENT_BINARY_DIR}/protos)
set(generated)
set(proto_names)
set(packages)
foreach(file ${proto_files})
  string(REGEX REPLACE "\\.proto$" "" stem ${file})
  list(APPEND generated ${proto_output}/horovod/protos/${stem}_pb2.py)
  list(APPEND proto_names horovod/protos/${file})
  list(APPEND proto_sources ${proto_root}/${file})
  get_filename_component(package ${stem} DIRECTORY)
  list(APPEND packages ${package})
endforeach()
list(REMOVE_DUPLICATES packages)

file(MAKE_DIRECTORY ${proto_output}/horovod/protos)
file(WRITE ${proto_output}/horovod/protos/__init__.py "\"\"\"Generated from protos/.\"\"\"\n")
file(WRITE ${proto_output}/horovod/protos/py.typed "")
foreach(package ${packages})
  file(WRITE ${proto_output}/horovod/protos/${package}/__init__.py "\"\"\"Generated from protos/${package}/.\"\"\"\n")
endforeach()

# mypy-protobuf's plug-in writes the type stubs of both messages and services.
get_filename_component(python_bin ${Python_EXECUTABLE} DIRECTORY)
find_program(PROTOC_GEN_MYPY protoc-gen-mypy HINTS ${python_bin} REQUIRED)
find_program(PROTOC_GEN_MYPY_GRPC protoc-gen-mypy_grpc HINTS ${python_bin} REQUIRED)
add_custom_command(
  OUTPUT ${generated}
  COMMAND ${Python_EXECUTABLE} -m grpc_tools.protoc
    -Ihorovod/protos=${proto_root}
    --plugin=protoc-gen-mypy=${PROTOC_GEN_MYPY}
    --plugin=protoc-gen-mypy_grpc=${PROTOC_GEN_MYPY_GRPC}
    --python_out=${proto_output} --grpc_python_out=${proto_output}
    --mypy_out=quiet:${proto_output} --mypy_grpc_out=quiet:${proto_output}
    ${proto_names}
  DEPENDS ${proto_sources}
  COMMENT "Generating horovod.protos"
  VERBATIM)
add_custom_target(horovod_protos ALL DEPENDS ${generated})
install(DIRECTORY ${proto_output}/horovod/protos DESTINATION horovod)
